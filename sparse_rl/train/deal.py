"""Deal the prompts of a step to processes so that all have about as much to sample and to learn from.

Prompts are dealt minibatch by minibatch. All members of a group stay in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..records import Trajectory
from ..tasks import Prompt


def deal(expected: Sequence[float], minibatches: int, processes: int) -> list[int]:
    """The rank of the process that samples each prompt: a minibatch's longest first, each to the least busy process.

    expected: tokens of each prompt's completions
    """
    loads, owner_rank = [0.0] * processes, [0] * len(expected)
    for block in torch.arange(len(expected)).tensor_split(minibatches):
        for i in sorted(block.tolist(), key=lambda i: -expected[i]):
            owner_rank[i] = min(range(processes), key=loads.__getitem__)
            loads[owner_rank[i]] += expected[i]
    return owner_rank


class LengthsSeen:
    """Predicts response lengths: a prompt's last mean if it was seen before, else a regression on prompt length."""

    def __init__(self):
        self.known: dict[int, float] = {}  # prompt index -> its last mean response length
        self.sums = torch.zeros(5, dtype=torch.float64)  # sums of 1, x, y, xx, xy (x prompt, y response tokens)

    def expect(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> list[float]:
        """The expected tokens of a completion of each prompt, the prompt's `tokens` included."""
        count, x, y, xx, xy = self.sums.tolist()
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread if spread > 1e-9 * max(count * xx, 1.0) else 0.0
        start = (y - slope * x) / count if count else 0.0
        return [n + max(1.0, self.known.get(p.index, start + slope * n)) for p, n in zip(prompts, tokens, strict=True)]

    def note(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], repeats: bool) -> None:
        """Learn from a step. `repeats`: prompts of the task come again, so each one is remembered."""
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for prompt, t in zip(prompts, trajectories):
            pair = (t.num_prompt_tokens, len(t.tokens) - t.num_prompt_tokens)
            found.setdefault((prompt.task, prompt.index), []).append(pair)
        for (_, index), pairs in found.items():
            x, y = pairs[0][0], sum(n for _, n in pairs) / len(pairs)
            self.sums += torch.tensor([1, x, y, x * x, x * y], dtype=torch.float64)
            if repeats:
                self.known[index] = y

    def state_dict(self) -> dict:
        return {"known": dict(self.known), "sums": self.sums.clone()}

    def load_state_dict(self, state: Mapping | None) -> None:
        if state:
            self.known, self.sums = dict(state["known"]), state["sums"].clone()
