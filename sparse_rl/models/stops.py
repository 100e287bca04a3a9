"""Decide which tokens end a response, and which of them a model learns to write, for all parts of the package.

Four sources name such tokens, and they do not always agree:

    chat template        the token that follows an assistant's content; decides for chats
    generation config    the ids at which `model.generate` stops; they always stop a response
    model config         the same for models without a generation config; otherwise a second opinion
    tokenizer            its eos token; in some GGUF files that is the token which begins a turn

So an eos token that neither the configs nor the template know is ignored if a template says what ends a turn, and
refused if none does.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import TemplateError

from ..errors import SparseRLError
from .record import record_of

_CONTENT = "Yes7yeS"  # an answer that no template contains
_ECHO = "<eos-of-the-tokenizer>"  # rendered in place of the tokenizer's eos token
_CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _CONTENT}]


@dataclass(frozen=True)
class Ends:
    """The tokens that end a response, by source."""

    turn: int | None  # the chat template, if it does not just repeat the tokenizer's eos token
    generation: tuple[int, ...]  # the generation config
    config: tuple[int, ...]  # the model's config
    tokenizer: int | None  # the tokenizer's eos token

    @property
    def model(self) -> tuple[int, ...]:
        return self.generation or self.config

    @property
    def contradicted(self) -> bool:
        """Whether the other sources name tokens, and the tokenizer's eos token is not among them."""
        known = {*self.generation, *self.config} | ({self.turn} - {None})
        return self.tokenizer is not None and bool(known) and self.tokenizer not in known

    def stops(self, both: bool = False) -> tuple[int, ...]:
        """All tokens that end a response. An undecided contradiction is refused, or, with `both`, both sides stop."""
        undecided = self.contradicted and self.turn is None
        if undecided and not both:
            raise SparseRLError(
                f"the tokenizer ends texts with id {self.tokenizer}, but the model stops at {_listed(self.model)}, and "
                "no chat template decides between them; set tokenizer.eos_token or "
                "model.generation_config.eos_token_id to the right one."
            )
        ignored = self.contradicted and not undecided
        named = (self.turn, *self.model, None if ignored else self.tokenizer)
        return tuple(sorted({i for i in named if i is not None}))

    def taught(self) -> int:
        """The one token that ends a worked solution: a chat's end of turn, or the end of text."""
        stops = self.stops()
        first = next((i for i in (self.turn, self.tokenizer, *self.model) if i in stops), None)
        if first is None:
            raise SparseRLError(
                "neither the tokenizer nor the model has an end token, so a solution could not end; set "
                "tokenizer.eos_token."
            )
        return first


def ends_of(model, tokenizer) -> Ends:
    """What every source says about this model and this tokenizer."""
    generation = _ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    config = _ids(getattr(model.config.get_text_config(decoder=True), "eos_token_id", None))
    return Ends(end_of_turn(tokenizer, {*generation, *config}), generation, config, tokenizer.eos_token_id)


def stop_ids(model, tokenizer) -> tuple[int, ...]:
    """The tokens that end a response of this model: its own, and those that its training stopped at."""
    record = record_of(model)
    return tuple(sorted({*ends_of(model, tokenizer).stops(), *(record.stop_ids if record else ())}))


def end_token(model, tokenizer) -> int:
    """The token that warm-up teaches a model to end with; one of its `stop_ids`."""
    return ends_of(model, tokenizer).taught()


def own_stop_ids(model) -> tuple[int, ...]:
    """The tokens at which a model stops according to its own configs, for callers without a tokenizer."""
    generation = _ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    return generation or _ids(getattr(model.config.get_text_config(decoder=True), "eos_token_id", None))


def repair(model, tokenizer) -> None:
    """Make tokenizer and generation config agree, so that everything that reads or saves them agrees.

    If model and chat template contradict the tokenizer's eos token, it becomes the end of turn, and the generation
    config stops there too. An undecided contradiction is left as it is: `stop_ids` refuses it.
    """
    ends = ends_of(model, tokenizer)
    if ends.turn is None:
        return
    if ends.contradicted:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends.turn)
    if ends.turn not in ends.model:
        model.generation_config.eos_token_id = [*ends.model, ends.turn]


def end_of_turn(tokenizer, known: set[int]) -> int | None:
    """The special token (or one of `known`) that the chat template writes after an assistant's content.

    None if there is no template, or if the template writes no such token, writes the tokenizer's eos token whatever it
    is, or cannot render such a chat.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        text = tokenizer.apply_chat_template(_CHAT, tokenize=False, eos_token=_ECHO)
    except TemplateError:  # a template may refuse a chat
        return None
    _, found, after = text.rpartition(_CONTENT)
    after = after.lstrip()
    if not (found and after) or after.startswith(_ECHO):
        return None
    special = known | set(tokenizer.get_added_vocab().values())
    first = next((i for i in tokenizer.encode(after, add_special_tokens=False) if tokenizer.decode([i]).strip()), None)
    return first if first in special else None


def _ids(value) -> tuple[int, ...]:
    """One id, several, or none."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _listed(ids: tuple[int, ...]) -> str:
    return " and ".join(map(str, ids))
