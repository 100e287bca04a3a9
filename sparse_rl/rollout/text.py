"""Text from any Hugging Face causal LM on a compressed cache, inside ordinary transformers code.

    text = sparse_rl.generate(model, tokenizer, messages, compressor="rkv", budget=512)
    for piece in sparse_rl.generate(model, tokenizer, messages, stream=True):
        print(piece, end="", flush=True)

The tokens are those `Engine.generate` gives for the same prompts, sampling and seed. Engines are kept with their model, so that a second
call allocates and captures nothing anew, and go with it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from torch import nn

from ..beacon import beacon_of
from ..compressors import Compressor, make
from ..errors import OutOfMemory, SparseRLError, require_int
from ..models import ModelShape, check_model, encode, stop_ids
from . import Engine, Sampling

_KEPT = 4  # engines of a model
_MOST_ROWS = 32  # unless told otherwise
_TOP_K = 50  # what transformers samples from when neither call nor model says
_CONTEXT = 64  # tokens decoded again with those that follow


def generate(
    model: nn.Module,
    tokenizer,
    messages: str | Sequence,
    compressor: str | Compressor | None = None,
    budget: int = 512,
    interval: int = 128,
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

    `messages` is a text, taken as it is; a chat (a list of {"role": ..., "content": ...}), put through the tokenizer's template; or a
    list of such prompts, whose answers come as a list. On a CPU they are what each prompt alone would get (a prompt given twice gets two
    samples); `rows` of them run at a time, by default up to 32.

    `compressor` is `rkv` unless the model has a beacon: then it is the one the beacon was made for, and must be named if it was made for
    several chunks or any. Under a beacon, and `dense`, budget and interval have no meaning. `compressor_options` are its parameters.

    What is not said about sampling is what `model.generation_config` says, as in `model.generate`: greedy, unless it has `do_sample`. A
    temperature alone samples from the whole distribution where it has not; temperature 0 is greedy. Penalties are not applied.

    `stream=True` gives, for one prompt, an iterator of pieces that make up the same text. Nothing runs between two pieces, and the model
    may then be used; whoever stops reading, for whatever reason, has stopped the rollout. One thread at a time may use a model.
    """
    prompts, single = _prompts(messages)
    if stream and not single:
        raise SparseRLError(
            f"stream=True takes one prompt, but {len(prompts)} were given; stream them one by one, or leave stream away."
        )
    if not isinstance(model, nn.Module):
        raise SparseRLError(
            f"the model is given as {type(model).__name__}, not as a model; load it first, with sparse_rl.load_model."
        )
    check_model(model)
    sampling = replace(_sampling(model, max_new_tokens, temperature, top_k, top_p), stop_ids=stop_ids(model, tokenizer))
    compressor = _default_compressor(model) if compressor is None else compressor
    options = dict(compressor_options or {})
    if options and isinstance(compressor, Compressor):
        raise SparseRLError(
            f"compressor_options {options} cannot change a {compressor.name} that is made already; make it with them."
        )
    made = make(compressor, **options)
    rows = _rows_for(len(prompts)) if rows is None else rows
    require_int(rows=rows)
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    settings = (type(made), compressor, repr(sorted(options.items())), budget, interval, rows)
    kept = _kept_with(model)

    def engine() -> Engine:
        return Engine(model, made, budget, interval, rows)

    def texts(engine: Engine) -> Iterator[list[str]]:
        yield [
            _decode(tokenizer, t.response_tokens.tolist()) for t in engine.generate(ids, sampling=sampling, seed=seed)
        ]

    def pieces(engine: Engine) -> Iterator[str]:
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


def _prompts(messages: str | Sequence) -> tuple[list, bool]:
    """(prompts, whether it was one): texts, or chats as lists of messages."""
    if isinstance(messages, str) or _is_chat(messages):
        return [messages], True
    if not isinstance(messages, (list, tuple)) or not all(
        isinstance(prompt, str) or _is_chat(prompt) for prompt in messages
    ):
        raise SparseRLError(
            f"messages is {messages!r:.80}; give a text, a chat like [{{'role': 'user', 'content': 'Hello'}}], or a list of such prompts."
        )
    return list(messages), False


def _is_chat(messages) -> bool:
    return (
        isinstance(messages, (list, tuple))
        and len(messages) > 0
        and all(isinstance(message, Mapping) for message in messages)
    )


def _sampling(
    model: nn.Module, max_new_tokens: int, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling:
    """What the call says, and where it does not, the model's generation config."""
    config = getattr(model, "generation_config", None)
    samples = bool(getattr(config, "do_sample", False))

    def own(name: str, unset: float):
        value = getattr(config, name, None)
        return unset if value is None else value

    if temperature is None:
        temperature = own("temperature", 1.0) if samples else 0.0
        if not samples and (top_k or (top_p is not None and top_p < 1)):
            warnings.warn(
                "this model answers greedily, so top_k and top_p have no effect; give a temperature too.", stacklevel=3
            )
    if top_k is None:
        top_k = own("top_k", _TOP_K) if samples else 0
    if top_p is None:
        top_p = own("top_p", 1.0) if samples else 1.0
    return Sampling(max_new_tokens, temperature, top_k, top_p)


def _default_compressor(model: nn.Module) -> str:
    beacon = beacon_of(model)
    if beacon is None:
        return "rkv"
    if len(beacon.chunks) == 1:
        return f"beacon:{beacon.chunks[0]}"
    chunks = " or ".join(map(str, beacon.chunks)) or "any number of"
    raise SparseRLError(
        f"this model's beacon was made for {chunks} tokens; name the compressor, such as compressor='beacon:16' or 'rkv'."
    )


def _rows_for(prompts: int) -> int:
    """Powers of two, so that batches of about the same size share an engine."""
    return min(_MOST_ROWS, 1 << max(0, prompts - 1).bit_length())


# ------------------------------------------------------------------------------------------------------------ engines


class _Kept:
    """A model's engines by their settings, the one used last at the end. Lives on the model, and is not copied or saved with it."""

    def __init__(self):
        self.made_for: tuple | None = None  # what the model was when they were made
        self.engines: dict[tuple, Engine] = {}

    def __reduce__(self):
        return _Kept, ()

    def run(self, settings: tuple, make: Callable[[], Engine], work: Callable[[Engine], Iterator]) -> Iterator:
        """What `work` yields on an engine that is kept or made. Where memory is short, those kept for other settings make room first."""
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
        """Nobody else gets it meanwhile: a second stream with the same settings runs on an engine of its own."""
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
    """Its engines; none if the model has changed its dtype, device or shape since, as they hold what it was."""
    kept = vars(model).setdefault("_sparse_rl_engines", _Kept())
    weight = next(model.parameters())
    now = (
        id(model),
        ModelShape.of(model.config, weight.dtype),
        weight.device,
    )  # a shallow copy of a model shares what it keeps
    if kept.made_for != now:
        kept.made_for, kept.engines = now, {}
    return kept


# ------------------------------------------------------------------------------------------------------------ text


def _decode(tokenizer, tokens: list[int]) -> str:
    """Spaces stay as the tokens have them: taking some away later would be too late for a stream."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextPieces:
    """The text of tokens that come one by one, as far as it is certain: `add(...)` + ... + `rest()` is the text of all of them.

    Held back is what later tokens can change: a character whose bytes are not all there (it reads as U+FFFD), and, where a vocabulary
    has tokens for single bytes, a run of them, which is read as a whole.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []  # all, or of a long text the last ones
        self.told = 0  # characters of their text

    def add(self, tokens: list[int]) -> str:
        self.tokens += tokens
        if self.in_bytes():
            return ""
        text = _decode(self.tokenizer, self.tokens)
        certain = text.rstrip("\ufffd")
        piece = certain[self.told :]
        self.told = max(self.told, len(certain))
        if len(certain) == len(text):
            self.forget()
        return piece

    def rest(self) -> str:
        return _decode(self.tokenizer, self.tokens)[self.told :]

    def in_bytes(self) -> bool:
        """Whether the last token that has a text stands for a byte."""
        last = next((token for token in reversed(self.tokens) if _decode(self.tokenizer, [token])), None)
        return (
            last is not None
            and re.fullmatch(r"<0x[0-9A-F]{2}>", self.tokenizer.convert_ids_to_tokens(last)) is not None
        )

    def forget(self) -> None:
        """Of a long text all of which is told, keep as much as tells how the next tokens are read."""
        if len(self.tokens) < 2 * _CONTEXT:
            return
        context = _decode(self.tokenizer, self.tokens[-_CONTEXT:])
        if context.strip():  # it begins the text in place of what is forgotten, where a tokenizer may leave out a space
            self.tokens, self.told = self.tokens[-_CONTEXT:], len(context)
