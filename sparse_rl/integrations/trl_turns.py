"""TRL's conversations with tools and environments, on one open engine: each is one row and one trace.

TRL asks for turns: first of all prompts, then, of those whose model called a tool, with what it said and the tool's
output behind the prompt. Here such a request is a conversation that goes on: only the tool's tokens are fed, after
those that were sampled, and nothing is read twice. Which conversation it is follows from its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import SparseRLError
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..rollout.conversation import Conversation

Turn = tuple[list[int], list[float]]  # sampled tokens and their log-probs


class OpenBatch:
    """The conversations of one call of TRL's `_generate`."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], sampling: Sampling, seed: int):
        """sampling: its limit is on sampled and given tokens together, as TRL's is"""
        self.sampling = sampling
        longest = max(map(len, prompts))
        most = longest + sampling.max_new_tokens + 2  # a turn without room is sampled for one token, which is dropped
        self.live = engine.open(
            longest, most, sampling, waiting=len(prompts), conversations=len(prompts), park=len(prompts)
        )
        seen: Counter[tuple[int, ...]] = Counter()
        self.conversations: list[Conversation] = []
        try:
            for i, prompt in enumerate(prompts):
                sample = seen[tuple(prompt)]  # equal prompts: the members of a group
                seen[tuple(prompt)] += 1
                self.conversations.append(self.live.submit(prompt, sampling, seed, sample=sample, prompt_index=i))
        except BaseException:
            self.live.close()
            raise

    def first_turns(self) -> list[Turn]:
        self.live.run()
        return [turn_of(c, len(c.prompt)) for c in self.conversations]

    def next_turns(self, prompts: Sequence[list[int]]) -> list[Turn]:
        """prompts: conversations so far, each with what is given behind it"""
        asked: list[tuple[Conversation, int]] = []
        free = list(self.conversations)
        for tokens in prompts:
            begun = [c for c in free if tokens[: len(c.tokens)] == c.tokens]
            conversation = max(begun, key=lambda c: len(c.tokens), default=None)
            if conversation is None:
                raise SparseRLError(
                    f"TRL asks for a turn after {len(tokens)} tokens that do not continue what was sampled; use a chat "
                    "template that only appends, so that sampled tokens are never encoded again."
                )
            free.remove(conversation)
            left = self.sampling.max_new_tokens - (len(tokens) - len(conversation.prompt))
            given = tokens[len(conversation.tokens) :]
            self.live.extend(conversation, given, replace(self.sampling, max_new_tokens=max(1, left)))
            asked.append((conversation, left))
        begins = [len(tokens) for tokens in prompts]
        self.live.run()
        turns = [turn_of(c, begin) for (c, _), begin in zip(asked, begins, strict=True)]
        return [(ids[:left], logprobs[:left]) for (ids, logprobs), (_, left) in zip(turns, asked, strict=True)]

    def close(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[Trajectory]:
        """The trajectories of TRL's rows; the engine is closed."""
        free = [self.live.release(conversation) for conversation in self.conversations]
        self.live.close()
        found = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens = [*prompt, *completion]
            same = [t for t in free if t.tokens[: len(tokens)].tolist() == tokens]
            trajectory = min(same, key=lambda t: len(t.tokens), default=None)
            if trajectory is None or len(trajectory.tokens) > len(tokens) + 1:
                raise SparseRLError(
                    f"TRL has a conversation of {len(tokens)} tokens that differs from what was sampled; leave "
                    "completions as they were sampled, because sparse rollouts cannot replay changed ones."
                )
            free = [t for t in free if t is not trajectory]
            found.append(replace(cut(trajectory, len(tokens)), prompt_index=i))
        return found

    def abandon(self) -> None:
        self.live.close()


def turn_of(conversation: Conversation, begin: int) -> Turn:
    return conversation.tokens[begin:], conversation.logprobs[begin:]


def cut(trajectory: Trajectory, tokens: int) -> Trajectory:
    """Its first tokens: TRL drops the one that was sampled behind a tool's output that leaves no room."""
    if tokens == len(trajectory.tokens):
        return trajectory
    assert tokens == len(trajectory.tokens) - 1 and trajectory.given is not None
    changed: dict[str, Any] = {
        "tokens": trajectory.tokens[:tokens],
        "sampler_logprobs": trajectory.sampler_logprobs[:tokens],
        "trace": trajectory.trace.slice(0, tokens),
        "given": trajectory.given[:tokens],
        "finish_reason": "length",
    }
    return replace(trajectory, **changed)
