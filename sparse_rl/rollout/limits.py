"""Check what a caller asks of an open engine: tokens, lengths, settings, and whether a conversation can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SparseRLError, any_of
from .conversation import Conversation
from .pieces import StopText
from .requests import check_sampling
from .sampling import Sampling
from .schedule import stop_list

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Limits:
    """What an engine was opened for. Its methods refuse what goes beyond."""

    engine: Engine
    prompt_tokens: int  # of the longest prompt
    max_tokens: int  # of the longest conversation
    tokenizer: Any  # for stop strings

    def check_length(self, tokens: int, what: str, *remedies: str) -> None:
        """Refuse a prompt that is too long."""
        if tokens > self.prompt_tokens:
            raise SparseRLError(
                f"{what} has {tokens} tokens, but this engine was opened for prompts of up to {self.prompt_tokens}; "
                f"{any_of(*remedies, f'open with prompt_tokens={tokens}')}."
            )

    def check_tokens(self, tokens: list[int], what: str) -> None:
        vocabulary = self.engine.shape.vocabulary
        if not tokens:
            raise SparseRLError(f"{what} is empty; give at least one token, such as the beginning-of-sequence token.")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            outside = min(tokens) if min(tokens) < 0 else max(tokens)
            raise SparseRLError(
                f"{what} holds token id {outside}, outside the vocabulary of {vocabulary}; was it made with another "
                "tokenizer?"
            )

    def check_room(self, tokens: int, more: int) -> None:
        if tokens + more >= self.max_tokens:
            given = f"{tokens} tokens and {more} that are given" if more else f"{tokens} tokens"
            raise SparseRLError(
                f"a conversation of {given} leaves no room for an answer, because this engine was opened for "
                f"conversations of up to {self.max_tokens}; open it with max_tokens={tokens + more + 1} or more."
            )

    def check_settings(self, sampling: Sampling, stop_strings: Sequence[str]) -> tuple[list[int], StopText | None]:
        """Refuse settings that this engine cannot use. -> stop ids, and what looks for stop strings"""
        check_sampling(sampling)
        state = self.engine.state
        assert state.settings is not None
        ids, most = stop_list(self.engine.model, sampling), state.settings.stop_ids.shape[1]
        if len(ids) > most:
            raise SparseRLError(f"{len(ids)} stop ids were given, but a conversation has at most {most}; give fewer.")
        room = sampling.room(self.engine.shape.vocabulary)
        if not state.has_room(room):
            raise SparseRLError(
                f"this engine was not opened to record support={sampling.support!r}; open it with such a sampling."
            )
        listed = isinstance(stop_strings, Sequence) and not isinstance(stop_strings, str)
        if not listed or not all(isinstance(text, str) and text for text in stop_strings):
            raise SparseRLError(f"stop_strings is {stop_strings!r:.60}; give a list of texts, none of them empty.")
        if stop_strings and self.tokenizer is None:
            raise SparseRLError("stop strings need a tokenizer; open the engine with tokenizer=...")
        return ids, StopText(self.tokenizer, stop_strings) if stop_strings else None


def check_extendable(conversation: Conversation) -> None:
    number, status = conversation.number, conversation.status
    if status == "ended":
        raise SparseRLError(
            f"conversation {number} has ended; begin another with `submit`, or this one anew with `renew`."
        )
    if status != "stopped":
        raise SparseRLError(f"conversation {number} is {status}; wait until it has stopped to continue it.")


def check_renewable(conversation: Conversation) -> None:
    number, status = conversation.number, conversation.status
    if status not in ("stopped", "ended"):
        raise SparseRLError(
            f"conversation {number} is {status}; wait until it has stopped to begin it anew, or cancel it."
        )
