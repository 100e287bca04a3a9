"""A conversation: what the host knows about a sequence that may continue after it has stopped.

    waiting -> running -> stopped -> (extended) waiting -> running -> ... -> ended
                                     (renewed) ended; another one waits in its place, under a new trace

Its tokens are the prompt, then in turns what the policy sampled and what it was given. The host learns the sampled
tokens at every sync; the trace stays with the row until the conversation is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cache import Trace
from ..cache.support import Support
from ..records import Trajectory
from .queue import Row
from .sampling import Sampling
from .sent import on_host


@dataclass(frozen=True)
class Parked:
    """A copy of a row in host memory. Restored into any row, the conversation continues with the same bits."""

    slots: list[Tensor]  # slots in use, recent queries, attention received, states
    trace: Tensor  # [L, H, T] in the form in which rows write it
    ties: Tensor | None = None  # [N, 4], if slots of 8 bits note them


@dataclass(eq=False)
class Conversation:
    """The handle that `LiveEngine.submit` returns. Its public fields are for reading."""

    number: int
    prompt: list[int]
    seed: int
    stream: int  # of random numbers
    prompt_stream: int
    sampling: Sampling  # of this turn
    stop_ids: list[int]
    prompt_index: int = 0
    sample_index: int = 0
    status: str = "waiting"  # running, stopped; ended: cancelled, renewed, released or failed
    finish_reason: str | None = None  # how the last turn ended: stop or length; or cancelled, renewed, closed
    # How this turn began, known with its first token. prefilled: all tokens were read as a prompt, under a new trace;
    # extended: its row went on, perhaps after a stay in host memory, to the bit; restored: its row was made again from
    # its tokens and its trace, up to rounding.
    way: str = "prefilled"
    renewed: int = 0  # how often it was begun anew: its prompt then holds earlier turns
    tokens: list[int] = field(default_factory=list)  # prompt, sampled and given
    given: list[bool] = field(default_factory=list)  # by token: whether it was given, not sampled
    logprobs: list[float] = field(default_factory=list)  # by token; 0 for given ones
    version: int | None = None  # version of the oldest weights that sampled a token
    stop_strings: tuple[str, ...] = ()
    text: Any = None  # looks for stop strings in this turn, if there are any
    matched: str | None = None  # the stop string that ended the last turn
    row: int | None = None
    sequence: Row | None = None  # the state of its row
    ahead: list[int] = field(default_factory=list)  # tokens still to be fed: the last sampled one and given ones
    count: int = 0  # tokens sampled by the end of the last turn
    since: float = 0.0  # when it stopped
    parked: Parked | None = None
    trace: Trace | None = None  # if it has neither a row nor a copy of one
    told: int = 0  # tokens that `read` has returned
    supports: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)  # count, margin, ids by turn
    routes: list[Tensor] = field(default_factory=list)  # [n, M, k] of prompt, turns and given tokens, if recorded
    routed: int = 0  # sampled tokens among them

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.given, self.logprobs = [True] * len(self.prompt), [0.0] * len(self.prompt)
        self.told = len(self.prompt)

    @property
    def num_sampled(self) -> int:
        return len(self.given) - sum(self.given)

    def read(self) -> list[int]:
        """The tokens that were sampled since the last call, oldest first."""
        end = len(self.tokens)
        new = [self.tokens[i] for i in range(self.told, end) if not self.given[i]]
        self.told = end
        return new

    def receive(self, tokens: list[int], logprobs: list[float]) -> None:
        self.logprobs += logprobs
        self.given += [False] * len(tokens)
        self.tokens += tokens  # last, because another thread may read

    def give(self, tokens: list[int]) -> None:
        self.logprobs += [0.0] * len(tokens)
        self.given += [True] * len(tokens)
        self.tokens += tokens

    def trajectory(self, trace: Trace) -> Trajectory:
        """The conversation as one trajectory. trace: of all its tokens"""
        tokens, logprobs = on_host(self.tokens), on_host(self.logprobs, torch.float32)
        given, prompt = on_host(self.given), len(self.prompt)
        given[:prompt] = False
        return Trajectory(
            tokens=tokens,
            num_prompt_tokens=prompt,
            sampler_logprobs=logprobs,
            trace=trace,
            finish_reason="stop" if self.finish_reason == "stop" else "length",
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            version=self.version or 0,
            support=self.support(given) if self.supports else None,
            given=given if given.any() else None,
            renewed=self.renewed,
            stream=self.stream,
        )

    def support(self, given: Tensor) -> Support:
        """Which tokens could be drawn, over all turns. given bool [T]"""
        sampled = ~given
        sampled[: len(self.prompt)] = False
        counts, margins, ids = zip(*self.supports, strict=True)
        return Support(
            torch.zeros(len(given), dtype=torch.int32).masked_scatter(sampled, torch.cat(counts)),
            torch.zeros(len(given)).masked_scatter(sampled, torch.cat(margins)),
            None if ids[0] is None else torch.cat(ids),
        )
