"""What an algorithm asks of the learner, and the algorithms there are.

    grpo          clipped ratios and the group's advantages: GRPO and its relatives (loss.py)
    online-dpo    completions of a prompt in pairs (dpo.py)
    ppo           clipped ratios and a critic's advantages, token by token (ppo.py, critic.py)

An algorithm says what is learned from rewards. A method (method.py) says what is done about the compressed cache: how
the learner sees a trajectory, and which trajectories and tokens it trusts. The two are chosen apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .advantage import Credit, Estimated
from .batch import Batch, Scored
from .correct import Corrected

ALGORITHMS = {
    "grpo": "a clipped ratio times the group's advantage; loss.* and learn.advantage make it GSPO, Dr. GRPO, RLOO",
    "online-dpo": "the better of two completions of a prompt against the worse, held to a reference; dpo.*",
    "ppo": "a clipped ratio times what a critic says each token was worth; ppo.*, loss.*",
}


class Objective(Protocol):
    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the starting model are needed."""
        ...

    def credit(
        self, by_group: Callable[[], Estimated], rewards: Tensor, scored: Scored, corrected: Corrected
    ) -> Credit:
        """What the completions of a step were worth.

        by_group: finds advantages by comparing the completions of a prompt (advantage.py). rewards [N]; scored and
        corrected: of the same N rows. Whatever needs values of a critic finds them in `scored`.
        """
        ...

    def prepare(self, batch: Batch, row_sums: Callable[[Batch], Tensor]) -> tuple[Batch, dict[str, float]]:
        """The batch with what must be known of all rows before the first is learned from, and metrics.

        row_sums: finds the sum of every row's response log-probs under the weights as they are, fp64 [N]; only rows
        that are active are gone through, the others have 0.
        """
        ...

    def active(self, batch: Batch) -> Tensor:
        """The rows that can move the weights. bool [N]"""
        ...

    def micro_batch(
        self, logprobs: Tensor, part: Batch, values: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss of some rows, the sums that metrics are made of, and which tokens were clipped.

        logprobs [n, T] carry the gradient, and so do a critic's values [n, T], where the learner has one.
        -> (loss, sums, bool [n, T])
        """
        ...

    def metrics(self, sums: dict[str, float], batch: Batch) -> dict[str, float]:
        """What the sums over all micro-batches of an optimizer step say."""
        ...
