"""Build answers in OpenAI's format from events: text, tokens and log-probs, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..records import Trajectory
from ..rollout.pieces import TextPieces, decode
from .desk import Event


class Teller:
    """Returns the text of an answer as it grows, without its stop string. Text that may be the beginning of a stop
    string is held back.
    """

    def __init__(self, tokenizer, stop_strings: Sequence[str]):
        self.pieces, self.stops = TextPieces(tokenizer), list(stop_strings)
        self.held = ""

    def add(self, tokens: list[int]) -> str:
        self.held += self.pieces.add(tokens)
        certain = len(self.held) - max((self._begun(stop) for stop in self.stops), default=0)
        piece, self.held = self.held[:certain], self.held[certain:]
        return piece

    def end(self, matched: str | None) -> str:
        """The rest of the text."""
        rest = self.held + self.pieces.rest()
        return rest if matched is None else rest[: rest.find(matched)] if matched in rest else rest

    def _begun(self, stop: str) -> int:
        """How many of the last characters can belong to a stop string: all from where it was found or has begun."""
        if (found := self.held.find(stop)) >= 0:
            return len(self.held) - found
        longest = min(len(stop) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.held.endswith(stop[:n])), 0)


@dataclass
class Answer:
    """One of the choices in a response."""

    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    matched: str | None = None
    trajectory: Trajectory | None = None
    version: int = 0

    def add(self, event: Event, teller: Teller) -> str:
        """Take in news. -> the text that is new"""
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.version = event.version
        piece = teller.add(event.tokens)
        if event.finish_reason is not None:
            self.finish_reason, self.matched = event.finish_reason, event.matched
            self.trajectory = event.trajectory
            piece += teller.end(event.matched)
        self.text += piece
        return piece


@dataclass(frozen=True)
class Top:
    """The most likely tokens at every place, with their log-probs."""

    ids: list[list[int]]
    logprobs: list[list[float]]


def usage(answers: Sequence[Answer], prompts: int) -> dict[str, int]:
    sampled = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def chat_logprobs(tokenizer, tokens: list[int], logprobs: list[float], top: Top | None = None) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text(tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        others = [] if top is None else zip(top.ids[i], top.logprobs[i], strict=True)
        content.append({**entry(token, logprob), "top_logprobs": [entry(other, value) for other, value in others]})
    return {"content": content, "refusal": None}


def id_logprobs(tokens: list[int], logprobs: list[float], top: Top | None = None) -> dict[str, Any]:
    """`choices[].logprobs` of vLLM's generate: tokens are named by their ids, since its clients decode themselves."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": _finite(logprob), "bytes": None}

    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        others = [] if top is None else zip(top.ids[i], top.logprobs[i], strict=True)
        content.append({**entry(token, logprob), "top_logprobs": [entry(other, value) for other, value in others]})
    return {"content": content}


def completion_logprobs(
    tokenizer, tokens: list[int], logprobs: Sequence[float | None], top: Top | None, offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; the first token of an echoed prompt has none."""
    texts = [_text(tokenizer, token) for token in tokens]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    others: list[dict[str, float] | None] | None = None
    if top is not None:
        others = [
            None if own is None else {_text(tokenizer, i): _finite(value) for i, value in zip(ids, values, strict=True)}
            for own, ids, values in zip(logprobs, top.ids, top.logprobs, strict=True)
        ]
    return {
        "tokens": texts,
        "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
        "top_logprobs": others,
        "text_offset": offsets[: len(texts)],
    }


def head(kind: str, name: str, identity: str) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": name}


def _text(tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity


__all__ = ["Answer", "Teller", "Top", "chat_logprobs", "completion_logprobs", "decode", "head", "id_logprobs", "usage"]
