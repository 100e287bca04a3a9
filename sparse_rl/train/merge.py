"""Dividing a step among processes, and putting it together again as one process would have made it.

Prompts are dealt out minibatch by minibatch, so that the processes have about as much to sample and, in every optimizer step, to learn
from. All members of a group stay on one process. What the others need to know of a trajectory is small; its trace, which is not, stays
where it was sampled, and so does the learning from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .cache import Trace
from .learn.batch import Scored, join
from .samples import Rollout
from .tasks import Prompt


def deal(expected: Sequence[float], minibatches: int, processes: int) -> list[int]:
    """Which process samples each prompt: the longest of a minibatch first, always to the one that has least so far."""
    loads, owner = [0.0] * processes, [0] * len(expected)
    for block in torch.arange(len(expected)).tensor_split(minibatches):
        for i in sorted(block.tolist(), key=lambda i: -expected[i]):
            owner[i] = min(range(processes), key=loads.__getitem__)
            loads[owner[i]] += expected[i]
    return owner


class LengthsSeen:
    """How long responses may be expected to be: as those to the same prompt were; of one never seen, as its own length lets expect."""

    def __init__(self):
        self.known: dict[int, float] = {}  # by the prompt's place in its task: the mean response of the last step that had it
        self.sums = torch.zeros(5, dtype=torch.float64)  # of 1, x, y, xx, xy over prompts of x tokens with mean responses of y

    def expect(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> list[float]:
        """Tokens that a completion of each will have, the prompt's included."""
        count, x, y, xx, xy = self.sums.tolist()
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread if spread > 1e-9 * max(count * xx, 1.0) else 0.0
        start = (y - slope * x) / count if count else 0.0
        return [n + max(1.0, self.known.get(p.index, start + slope * n)) for p, n in zip(prompts, tokens, strict=True)]

    def note(self, rollout: Rollout, repeats: bool) -> None:
        """`repeats`: the task's prompts come back, so each is worth remembering."""
        found: dict[int, list[tuple[int, int]]] = {}
        for prompt, t in zip(rollout.prompts, rollout.trajectories):
            found.setdefault(prompt.index, []).append((t.num_prompt_tokens, len(t.tokens) - t.num_prompt_tokens))
        for index, pairs in found.items():
            x, y = pairs[0][0], sum(n for _, n in pairs) / len(pairs)
            self.sums += torch.tensor([1, x, y, x * x, x * y], dtype=torch.float64)
            if repeats:
                self.known[index] = y

    def state_dict(self) -> dict:
        return {"known": dict(self.known), "sums": self.sums.clone()}

    def load_state_dict(self, state: Mapping | None) -> None:
        if state:
            self.known, self.sums = dict(state["known"]), state["sums"].clone()


def outlined(rollout: Rollout) -> Rollout:
    """What other processes need of a part: of its traces one head, which evicts when all do."""
    traces = tuple(outline(trace) for trace in rollout.scored.sampled.traces)
    return replace(
        rollout,
        trajectories=[replace(t, trace=trace) for t, trace in zip(rollout.trajectories, traces, strict=True)],
        scored=replace(rollout.scored, sampled=replace(rollout.scored.sampled, traces=traces)),
    )


def outline(trace: Trace) -> Trace:
    return Trace(trace.evicted_at[:1, :1].clone())


def merge(parts: Sequence[Rollout], group_size: int) -> Rollout:
    """The parts of all processes as one rollout: by round of sampling, then prompt by prompt."""
    if len(parts) == 1:
        return parts[0]
    places: list[tuple[int, int]] = []  # (round, place in the step) of every trajectory, part after part
    for part in parts:
        rounds: Counter[int] = Counter()
        for slot in slots(part, group_size):
            places.append((rounds[slot], slot))
            rounds[slot] += 1
    order = sorted(range(len(places)), key=places.__getitem__)
    now_at = torch.empty(len(order), dtype=torch.int64)
    now_at[order] = torch.arange(len(order))
    chosen, start = torch.empty(sum(len(part.chosen) for part in parts), dtype=torch.int64), 0
    for part in parts:
        chosen[[places[start + i][1] for i in part.chosen.tolist()]] = now_at[start + part.chosen]
        start += len(part.trajectories)

    def in_order(name: str) -> list:
        every = [value for part in parts for value in getattr(part, name)]
        return [every[i] for i in order]

    scored: Scored = join(*(part.scored for part in parts))
    alpha = {slot: values for part in parts for slot, values in part.alpha.items()}
    return Rollout(
        *(in_order(name) for name in ("prompts", "trajectories", "texts", "grades")),
        scored=scored.rows(torch.tensor(order)),
        chosen=chosen,
        alpha={slot: alpha[slot] for slot in sorted(alpha)},
        seconds=max(part.seconds for part in parts),
        trace_bytes=sum(part.trace_bytes for part in parts),
    )


def slots(rollout: Rollout, group_size: int) -> list[int]:
    """The place in the step that each trajectory was sampled for."""
    return [t.prompt_index * group_size + t.sample_index for t in rollout.trajectories]


def owned(scored: Scored, rank: int) -> Scored:
    """A part as sampled by the process of that rank."""
    owner: Tensor = torch.full_like(scored.sampled.lengths, rank)
    return replace(scored, sampled=replace(scored.sampled, owner=owner))
