"""The interface of algorithms, and the list of them.

    grpo          clipped ratios and the group's advantages: GRPO and its relatives (loss.py)
    online-dpo    completions of a prompt in pairs (dpo.py)
    ppo           clipped ratios and a critic's advantages, token by token (ppo.py, critic.py)

An algorithm says what is learned from rewards. A method (method.py) says what is done about the compressed cache: how
the learner sees a trajectory, and which trajectories and tokens it trusts. The two are chosen independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .advantage import Credit, Estimated
from .batch import Batch, Scored
from .correct import Corrected

ALGORITHMS = {
    "grpo": "a clipped ratio times the group's advantage; loss.* and learn.advantage make it one of its relatives",
    "online-dpo": "the better of two completions of a prompt against the worse, held to a reference; dpo.*",
    "ppo": "a clipped ratio times what a critic says each token was worth; ppo.*, loss.*",
}

# Relatives of GRPO: what each does, and the settings of GRPO that make it.
RELATIVES: dict[str, tuple[str, dict[str, str | float]]] = {
    "rloo": ("compares a completion with the mean of the others", {"learn.advantage": "rloo"}),
    "dr-grpo": (
        "divides neither by the group's spread nor by a response's length",
        {"learn.advantage": "dr-grpo", "loss.mean": "dr-grpo"},
    ),
    "gspo": (
        "clips the ratio of whole responses",
        {"loss.level": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    ),
    "dapo": (
        "clips higher, means over tokens, replaces prompts that teach nothing, and punishes responses near their limit",
        {"loss.clip_high": 0.28, "loss.mean": "token-mean", "learn.dynamic": 10, "task.overlong": 0.2},
    ),
    "cispo": (
        "clips the weight of a token's gradient, so that no token is dropped",
        {"loss.clip": "weight", "loss.clip_low": 1.0, "loss.clip_high": 4.0, "loss.mean": "token-mean"},
    ),
}


def settings_of(relative: str) -> str:
    """The settings of a relative of GRPO, as options of a command."""
    return " ".join(f"--{name} {value}" for name, value in RELATIVES[relative][1].items())


class Objective(Protocol):
    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the starting model are needed."""
        ...

    def credit(
        self, by_group: Callable[[], Estimated], rewards: Tensor, scored: Scored, corrected: Corrected
    ) -> Credit:
        """The advantages of a step's completions.

        by_group: computes advantages by comparing the completions of a prompt (advantage.py). rewards [N]; scored and
        corrected: of the same N rows. `scored` holds a critic's values, if there is one.
        """
        ...

    def prepare(self, batch: Batch, row_sums: Callable[[Batch], Tensor]) -> tuple[Batch, dict[str, float]]:
        """Add to the batch what must be known of all rows before any of them is learned from; also returns metrics.

        row_sums: computes the sum of every active row's response log-probs under the present weights, fp64 [N]; other
        rows have 0.
        """
        ...

    def active(self, batch: Batch) -> Tensor:
        """The rows that can change the weights. bool [N]"""
        ...

    def micro_batch(
        self, logprobs: Tensor, part: Batch, values: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss of some rows, the sums for metrics, and which tokens were clipped.

        logprobs [n, T] carry the gradient, and so do a critic's values [n, T], if there is one.
        -> (loss, sums, bool [n, T])
        """
        ...

    def metrics(self, sums: dict[str, float], batch: Batch) -> dict[str, float]:
        """Metrics from the sums over all micro-batches of an optimizer step."""
        ...
