"""Generate text with a supported Hugging Face causal LM (docs/models.md) on a compressed cache.

    text = sparse_rl.generate(model, tokenizer, messages, compressor="rkv", budget=512)
    for piece in sparse_rl.generate(model, tokenizer, messages, stream=True):
        print(piece, end="", flush=True)

The tokens are those that `Engine.generate` gives for the same prompts, sampling and seed. Engines are kept with their
model, so that a second call allocates and captures nothing again, and are freed with it.
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
_BUDGET, _INTERVAL = 512, 128  # for models without a record
_KEPT = 4  # engines kept with a model
_MOST_ROWS = 32  # unless the call says otherwise
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

    `messages` is a text, which is used as it is; a chat (a list of {"role": ..., "content": ...}), which is written
    with the tokenizer's template; or a list of such prompts, whose answers are returned as a list. On a CPU each answer
    is the one that the prompt alone would get (a prompt given twice gets two samples). `rows` prompts run at a time, by
    default up to 32.

    A model that was trained here brings its compressor, options, budget, interval and stop ids along
    (models/record.py); a line in the log says so, and arguments override them. If the compressor is named, only the
    given options count. For other models the defaults are `rkv`, budget 512 and interval 128. A model with a beacon
    uses the compressor that the beacon was trained for; name it if the beacon was trained for several chunk sizes or
    for any. With a beacon, and with `dense`, budget and interval have no meaning. `compressor_options` are the
    parameters of the compressor.

    Sampling settings that the call does not give come from `model.generation_config`, as in `model.generate`: greedy,
    unless it has `do_sample`. Without `do_sample`, a temperature alone samples from the whole distribution;
    temperature 0 is greedy. Penalties are not applied.

    `stream=True` returns, for one prompt, an iterator of pieces that make up the same text. Nothing runs between two
    pieces, so the model may be used in between, and a reader who stops reading stops the rollout. Only one thread at a
    time may use a model.
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
            f"compressor_options {options} cannot change a {compressor.name} that exists already; pass them when you "
            "make it."
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
    """Compressor, budget, interval and options: as given, else as in the model's training, else the defaults. Also a
    line for the log if the compressor is that of training.
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
    """(prompts, whether a single one was given): texts, or chats as lists of messages."""
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
    """The call's own settings, completed from the model's generation config."""
    config = getattr(model, "generation_config", None)
    samples = bool(getattr(config, "do_sample", False))

    def own(name: str, unset: float, greedy: float) -> Any:
        """The setting of the model's generation config, if that samples."""
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
    """The next power of two, so that batches of about the same size share an engine."""
    return min(_MOST_ROWS, 1 << max(0, prompts - 1).bit_length())


# -------------------------------------------------------------------------------------------------------- engines


class _Kept:
    """A model's engines by their settings, last used last. It is an attribute of the model, but not copied with it."""

    def __init__(self):
        self.made_for: tuple | None = None  # the model's dtype, device and shape when they were made
        self.engines: dict[tuple, Engine] = {}

    def __reduce__(self):
        return _Kept, ()

    def run(
        self, settings: tuple, make: Callable[[], Engine], work: Callable[[Engine], Generator[_Result, None, None]]
    ) -> Iterator[_Result]:
        """Yield what `work` yields on an engine for these settings, kept or new.

        If memory is short, engines kept for other settings are freed first.
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
        """Lend an engine to one caller; a second stream with the same settings gets another engine."""
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
