"""PPO: a critic estimates what every token was worth, and the clipped surrogate (loss.py) learns from that.

    rho_t    = [t is the last response token] reward  - beta (old_t - reference_t)      `kl: reward`; else without beta
    delta_t  = rho_t + gamma V_{t+1} - V_t                                              V after the last token is 0
    A_t      = delta_t + gamma lam A_{t+1}                                              GAE, over response tokens
    R_t      = A_t + V_t                                                                the critic's targets
    value    = 1/2 mean_t max( (V - R)^2, (clip(V, V_old +- value_clip) - R)^2 )
    loss     = surrogate(A) + beta k3 + value_weight value                              beta k3 only with `kl: loss`

V_t is the value of the state before token t, in the learner's view; V_old is computed with the old log-probs. A is
whitened over the tokens of a step that count; R is not. The mean is `loss.mean`, as everywhere.

A response that was cut at `rollout.max_new_tokens` ends there: its reward, given for the text so far, counts at its
last token, and nothing is added for what might have followed. The limit is part of the task.

A correction drops tokens from the loss and weights the surrogate, as for GRPO. GAE still covers every response token.
The value loss has no weights: a baseline may be any function of the state, and the best one predicts what the sampler
gets.

Shapes: N trajectories, T tokens (padded). All masks are bool [N, T].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest, require_int
from ..keys import key
from .advantage import Credit, Estimated
from .loss import Loss

if TYPE_CHECKING:
    from .batch import Batch, Scored
    from .correct import Corrected

CRITICS = ("trunk", "separate")
KL_PLACES = ("reward", "loss")


@dataclass(frozen=True)
class PPO:
    """The section `ppo` of a recipe."""

    critic: str = key(
        "what estimates values: a head on the policy's own `trunk`, or a `separate` copy of the starting model", "trunk"
    )
    gamma: float = key("discount per token", 1.0)
    lam: float = key("GAE's lambda: 1 trusts only the rewards; smaller values trust the critic more", 0.95)
    whiten: bool = key("give advantages mean 0 and variance 1 over the tokens of a step", True)
    value_clip: float | None = key(
        "most that a value may differ from its old value in the value loss; null: no bound", 0.2
    )
    value_weight: float = key("factor of the value loss", 0.1)
    kl: str = key(
        "where the KL to the starting model (loss.beta) is added: to each token's `reward`, or to the `loss`", "reward"
    )
    critic_lr: float | None = key("learning rate of the value head or critic; null: 10 x optimizer.lr", None)
    warmup_steps: int = key("optimizer steps at the start of a run that train only the value head or critic", 0)

    def __post_init__(self):
        for name, known in (("critic", CRITICS), ("kl", KL_PLACES)):
            if getattr(self, name) not in known:
                raise SparseRLError(f"ppo.{name} is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise SparseRLError(f"ppo.{name} is {getattr(self, name)}; it must be from 0 to 1.")
        if self.value_clip is not None and not 0 < self.value_clip < math.inf:
            raise SparseRLError(f"ppo.value_clip is {self.value_clip}; it must be above 0, or null for no bound.")
        if not 0 < self.value_weight < math.inf:
            raise SparseRLError(f"ppo.value_weight is {self.value_weight}; it must be above 0, such as 0.1.")
        if self.critic_lr is not None and not 0 < self.critic_lr < 1:
            raise SparseRLError(f"ppo.critic_lr is {self.critic_lr}; it must be above 0 and below 1, such as 1e-5.")
        require_int(at_least=0, **{"ppo.warmup_steps": self.warmup_steps})


@dataclass(frozen=True)
class ActorCritic:
    """PPO as an objective of the learner (objective.py)."""

    ppo: PPO
    loss: Loss

    @property
    def needs_reference(self) -> bool:
        return self.loss.beta > 0

    def credit(
        self, by_group: Callable[[], Estimated], rewards: Tensor, scored: Scored, corrected: Corrected
    ) -> Credit:
        """Advantages and returns of every token, from the critic's values."""
        assert scored.values is not None, "PPO needs the critic's values"
        response, counts, values = scored.sampled.mask, corrected.mask, scored.values.double()
        earned = terminal_rewards(rewards, response)
        if self.needs_reference and self.ppo.kl == "reward":
            assert scored.reference_logprobs is not None, "a KL in the reward needs the reference's log-probs"
            penalty = scored.old_logprobs.double() - scored.reference_logprobs.double()
            earned = earned - self.loss.beta * torch.where(response, penalty, 0.0)
        found = gae(earned, values, response, self.ppo.gamma, self.ppo.lam)
        returns = found + values
        advantages = whiten(found, counts) if self.ppo.whiten else torch.where(counts, found, 0.0)
        return Credit(advantages, value_metrics(values, returns, found, counts), returns)

    def prepare(self, batch: Batch, row_sums: Callable[[Batch], Tensor]) -> tuple[Batch, dict[str, float]]:
        return batch, {}  # no row depends on another

    def active(self, batch: Batch) -> Tensor:
        return batch.mask.any(1)  # the critic learns from every row

    def micro_batch(
        self, logprobs: Tensor, part: Batch, values: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        assert values is not None and part.old_values is not None and part.returns is not None
        surrogate = self.loss if self.ppo.kl == "loss" else replace(self.loss, beta=0.0)
        loss, sums, clipped = surrogate.micro_batch(logprobs, part)
        of_values, cut = value_loss(values, part.old_values, part.returns, part.mask, part.scale, self.ppo.value_clip)
        sums |= {"value_loss": of_values.detach(), "value_clipped": cut.sum()}
        return loss + self.ppo.value_weight * of_values, sums, clipped

    def metrics(self, sums: dict[str, float], batch: Batch) -> dict[str, float]:
        shown = self.loss if self.ppo.kl == "loss" else replace(self.loss, beta=0.0)
        return shown.metrics(sums, batch) | {
            "update/value_loss": sums["value_loss"],
            "update/value_clip/frac": sums["value_clipped"] / max(sums["tokens"], 1),
        }


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Put every trajectory's reward at its last response token. rewards [N] -> fp64 [N, T]"""
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, rewards.double()[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates over the tokens of the mask, 0 elsewhere. rewards, values [N, T] -> [N, T]

    Tokens off the mask (prompt, beacons, padding, given tokens of a conversation) are not steps: the token after them
    directly follows the token before them. So the last token of a turn is followed, without a further discount, by the
    value of the state before the next turn. That state has read the reply, so the reply affects this advantage.
    """
    found = torch.zeros_like(values)
    after, value_after = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        found[:, t] = torch.where(mask[:, t], delta + gamma * lam * after, 0.0)
        after = torch.where(mask[:, t], found[:, t], after)
        value_after = torch.where(mask[:, t], values[:, t], value_after)
    return found


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean 0 and (unbiased) variance 1 over the mask; 0 elsewhere. [N, T] -> [N, T]"""
    count = mask.sum()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    centred = torch.where(mask, values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, scale: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the mean squared error, and the tokens at which the clipped value had the larger error.

    values [N, T] carry the gradient; scale [N, T] turns the sum over tokens into the mean. -> (loss, bool [N, T])
    """
    error, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None:
        bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        clipped = (bounded > error) & mask
        error = torch.maximum(error, bounded)
    return 0.5 * torch.where(mask, scale * error, 0.0).sum(), clipped


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN if all returns are equal.

    values, returns [n]
    """
    if len(returns) < 2 or not (spread := returns.var()) > 1e-12:
        return math.nan
    return 1 - ((returns - values).var() / spread).item()


def value_metrics(values: Tensor, returns: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of the critic before the update, over the tokens that count. All [N, T]; advantages before whitening"""
    if not mask.any():
        return {}
    metrics = {
        "advantage/abs/mean": advantages[mask].abs().mean().item(),
        "value/old/mean": values[mask].mean().item(),
        "value/return/mean": returns[mask].mean().item(),
    }
    explained = explained_variance(values[mask], returns[mask])
    return metrics if math.isnan(explained) else metrics | {"value/explained/frac": explained}
