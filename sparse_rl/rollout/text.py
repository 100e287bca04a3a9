"""Text from a supported Hugging Face causal LM (docs/models.md) on a compressed cache, inside transformers code.

    text = sparse_rl.generate(model, tokenizer, messages, compressor="rkv", budget=512)
    for piece in sparse_rl.generate(model, tokenizer, messages, stream=True):
        print(piece, end="", flush=True)

The tokens are those that `Engine.generate` gives for the same prompts, sampling and seed. Engines are kept with their
model, so that a second call allocates and captures nothing anew, and are freed with it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..compressors import Compressor, default_compressor, make
from ..errors import OutOfMemory, SparseRLError, require_int
from ..files import names_python_file
from ..models import ModelShape, Record, check_model, encode, record_of, stop_ids
from . import Engine, Sampling
from .pieces import TextPieces, decode

_LOG = logging.getLogger("sparse_rl")
_BUDGET, _INTERVAL = 512, 128  # of models without a record
_KEPT = 4  # engines of a model
_MOST_ROWS = 32  # unless told otherwise
_TOP_K = 50  # what transformers uses when neither the call nor the model says

_Result = TypeVar("_Result")


def generate(
    model: nn.Module,
    tokenizer,
    messages: str | Sequence,
    compressor: str | Compressor | None = None,
    budget: int | None = None,
    interval: int | None = None,
    *,
    max_new_tokens: int = 512,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    rows: int | None = None,
    compressor_options: Mapping | None = None,
    stream: bool = False,
) -> str | list[str] | Iterator[str]:
    """The model's answer as text, without special tokens.

    `messages` is a text, taken as it is; a chat (a list of {"role": ..., "content": ...}), put through the tokenizer's
    template; or a list of such prompts, whose answers come as a list. On a CPU they are what each prompt alone would
    get (a prompt given twice gets two samples); `rows` of them run at a time, by default up to 32.

    A model that was trained here brings its compressor, options, budget, interval and stop ids along
    (models/record.py); a line in the log says so, and arguments come first. If the compressor is named, its options are
    those that are given. For other models `compressor` is `rkv`, budget 512, interval 128; with a beacon it is the one
    that the beacon was made for, and must be named if the beacon was made for several chunks or for any. Under a
    beacon, and under `dense`, budget and interval have no meaning. `compressor_options` are the parameters of the
    compressor.

    Where the call does not say how to sample, `model.generation_config` does, as in `model.generate`: greedily,
    unless it has `do_sample`. Without `do_sample`, a temperature alone samples from the whole distribution;
    temperature 0 is greedy. Penalties are not applied.

    `stream=True` gives, for one prompt, an iterator of pieces that make up the same text. Nothing runs between two
    pieces, and the model may then be used; a reader who stops reading, for whatever reason, stops the rollout. One
    thread at a time may use a model.
    """
    prompts, single = _prompts(messages)
    if stream and not single:
        raise SparseRLError(
            f"stream=True takes one prompt, but {len(prompts)} were given; stream them one by one, or omit stream."
        )
    if not isinstance(model, nn.Module):
        raise SparseRLError(
            f"the model is a {type(model).__name__}, not a module; load it first, with sparse_rl.load_model."
        )
    check_model(model)
    sampling = replace(_sampling(model, max_new_tokens, temperature, top_k, top_p), stop_ids=stop_ids(model, tokenizer))
    options = dict(compressor_options or {})
    compressor, budget, interval, options, note = _cache(model, compressor, budget, interval, options)
    if options and isinstance(compressor, Compressor):
        raise SparseRLError(
            f"compressor_options {options} cannot change a {compressor.name} that exists already; make it with them."
        )
    made = make(compressor, **options)
    rows = _rows_for(len(prompts)) if rows is None else rows
    require_int(rows=rows)
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    settings = (type(made), compressor, repr(sorted(options.items())), budget, interval, rows)
    kept = _kept_with(model)

    def engine() -> Engine:
        if note:
            _LOG.warning(note)
        return Engine(model, made, budget, interval, rows)

    def texts(engine: Engine) -> Generator[list[str], None, None]:
        done = engine.generate(ids, sampling=sampling, seed=seed)
        yield [decode(tokenizer, trajectory.response_tokens.tolist()) for trajectory in done]

    def pieces(engine: Engine) -> Generator[str, None, None]:
        text = TextPieces(tokenizer)
        with closing(engine.stream(ids[0], sampling, seed)) as tokens:
            for new in tokens:
                if piece := text.add(new):
                    yield piece
        if piece := text.rest():
            yield piece

    if stream:
        return kept.run(settings, engine, pieces)
    (answers,) = kept.run(settings, engine, texts)
    return answers[0] if single else answers


def _cache(
    model: nn.Module, compressor: str | Compressor | None, budget: int | None, interval: int | None, options: dict
) -> tuple[str | Compressor, int, int, dict, str | None]:
    """Compressor, budget, interval and options: as given, else as in the model's training, else the usual ones; and a
    line if the compressor is that of training.
    """
    record = record_of(model) or Record()
    budget = next(value for value in (budget, record.budget, _BUDGET) if value is not None)
    interval = next(value for value in (interval, record.interval, _INTERVAL) if value is not None)
    if compressor is not None or record.compressor is None:
        return default_compressor(model) if compressor is None else compressor, budget, interval, options, None
    if names_python_file(record.compressor):
        raise SparseRLError(
            f"this model was trained with the compressor {record.compressor!r:.300}, a Python file that would run with "
            "your rights; read that file, then name it yourself: compressor='FILE.py'."
        )
    options = {**record.options_at(budget), **options}
    slots = f"{record.compressor}, budget {budget}, interval {interval}"
    more = "".join(f", {key} {value}" for key, value in options.items())
    return record.compressor, budget, interval, options, f"the cache of the model's training is used: {slots}{more}"


def _prompts(messages: str | Sequence) -> tuple[list, bool]:
    """(prompts, whether it was one): texts, or chats as lists of messages."""
    if isinstance(messages, str) or _is_chat(messages):
        return [messages], True
    known = isinstance(messages, (list, tuple)) and all(isinstance(p, str) or _is_chat(p) for p in messages)
    if not known:
        raise SparseRLError(
            f"messages is {messages!r:.80}; give a text, a chat like [{{'role': 'user', 'content': 'Hello'}}], "
            "or a list of such prompts."
        )
    return list(messages), False


def _is_chat(messages) -> bool:
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    return is_list and all(isinstance(message, Mapping) for message in messages)


def _sampling(
    model: nn.Module, max_new_tokens: int, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling:
    """The call's own settings, and those of the model's generation config where the call has none."""
    config = getattr(model, "generation_config", None)
    samples = bool(getattr(config, "do_sample", False))

    def own(name: str, unset: float, greedy: float) -> Any:
        """The model's setting, if it samples."""
        value = getattr(config, name, None) if samples else greedy
        return unset if value is None else value

    if temperature is None and not samples and (top_k or (top_p is not None and top_p < 1)):
        warnings.warn(
            "this model answers greedily, so top_k and top_p have no effect; give a temperature too.", stacklevel=3
        )
    return Sampling(
        max_new_tokens,
        own("temperature", 1.0, greedy=0.0) if temperature is None else temperature,
        own("top_k", _TOP_K, greedy=0) if top_k is None else top_k,
        own("top_p", 1.0, greedy=1.0) if top_p is None else top_p,
    )


def _rows_for(prompts: int) -> int:
    """Powers of two, so that batches of about the same size share an engine."""
    return min(_MOST_ROWS, 1 << max(0, prompts - 1).bit_length())


# -------------------------------------------------------------------------------------------------------- engines


class _Kept:
    """A model's engines by their settings, the last used one last. It lives on the model, and is not copied with it."""

    def __init__(self):
        self.made_for: tuple | None = None  # what the model was when they were made
        self.engines: dict[tuple, Engine] = {}

    def __reduce__(self):
        return _Kept, ()

    def run(
        self, settings: tuple, make: Callable[[], Engine], work: Callable[[Engine], Generator[_Result, None, None]]
    ) -> Iterator[_Result]:
        """What `work` yields on an engine that is kept or made.

        Where memory is short, the engines kept for other settings are freed first.
        """
        others = [known for known in self.engines if known != settings]
        begun = False
        try:
            with self.borrowed(settings, make) as engine, closing(work(engine)) as results:
                for result in results:
                    begun = True
                    yield result
            return
        except OutOfMemory:
            if begun or not others:
                raise
            self.engines.clear()
        yield from self.run(settings, make, work)

    @contextmanager
    def borrowed(self, settings: tuple, make: Callable[[], Engine]) -> Iterator[Engine]:
        """Lend an engine to one caller: a second stream with the same settings runs on an engine of its own."""
        made_for = self.made_for
        engine = self.engines.pop(settings, None) or make()
        try:
            yield engine
        finally:
            if self.made_for == made_for:
                self.engines[settings] = engine
                while len(self.engines) > _KEPT:
                    self.engines.pop(next(iter(self.engines)))


def _kept_with(model: nn.Module) -> _Kept:
    """A model's engines; none if its dtype, device or shape has changed since they were made."""
    kept = vars(model).setdefault("_sparse_rl_engines", _Kept())
    weight = next(model.parameters())
    # The id, because a shallow copy of a model shares what it keeps.
    now = (id(model), ModelShape.of(model.config, weight.dtype), weight.device)
    if kept.made_for != now:
        kept.made_for, kept.engines = now, {}
    return kept
