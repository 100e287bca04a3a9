"""Online DPO: learns from pairs of completions of a prompt, instead of from ratios and advantages.

    s_i   = sum over the response of log pi(token)              ref_i: the same under the reference, which is fixed
    h     = (s_chosen - s_rejected) - (ref_chosen - ref_rejected)
    loss  = - (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h)          `sigmoid`, eps: label smoothing
            (h - 1 / (2 beta))^2                                                `ipo`

The members of a pair may be in different micro-batches, so the gradient takes two passes: the first computes every s
without gradients; the second goes through rows in any order with the loss  sum_i (dL / ds_i) s_i, whose gradient is
that of L. Memory is that of one micro-batch, however large a group is; the price is one more forward pass.

Corrections only decide who may be paired: a rejected trajectory is in no pair. There is no ratio to clip or to weight.

Shapes: N trajectories, T tokens (padded), P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import SparseRLError, nearest
from ..keys import key
from ..streams import uniform
from .advantage import Credit, Estimated

if TYPE_CHECKING:
    from .batch import Batch, Scored
    from .correct import Corrected

KINDS = ("sigmoid", "ipo")
RULES = ("best-worst", "all")
REFERENCES = ("view", "dense")


@dataclass(frozen=True)
class DPO:
    """The section `dpo` of a recipe, and the objective that the learner follows."""

    beta: float = key("how strongly the policy is held to the reference; larger is closer", 0.1)
    loss: str = key("loss of a pair: sigmoid, or ipo: (h - 1 / (2 beta))^2", "sigmoid")
    label_smoothing: float = key("share of pairs that the sigmoid loss assumes to be labelled the wrong way round", 0.0)
    pairs: str = key("best-worst: one pair per group; all: every pair with different rewards", "best-worst")
    reference: str = key("how the reference sees a response: in the learner's `view`, or always `dense`", "view")
    per_token: bool = key("divide log-probs by the response's length, which helps with long responses", False)

    def __post_init__(self):
        for name, known in (("loss", KINDS), ("pairs", RULES), ("reference", REFERENCES)):
            if getattr(self, name) not in known:
                raise SparseRLError(f"dpo.{name} is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        if not 0 < self.beta < math.inf:
            raise SparseRLError(f"dpo.beta is {self.beta}; it must be above 0, such as 0.1.")
        if not 0 <= self.label_smoothing < 0.5:
            raise SparseRLError(f"dpo.label_smoothing is {self.label_smoothing}; it must be from 0 to below 0.5.")
        if self.label_smoothing and self.loss != "sigmoid":
            raise SparseRLError(
                f"dpo.label_smoothing is {self.label_smoothing}, but dpo.loss is {self.loss}, which does not use it; "
                "set it to 0."
            )

    # ------------------------------------------------------------------------- as an objective (objective.py)

    @property
    def needs_reference(self) -> bool:
        return True

    def credit(
        self, by_group: Callable[[], Estimated], rewards: Tensor, scored: Scored, corrected: Corrected
    ) -> Credit:
        return Credit(*by_group())  # only for metrics

    def prepare(self, batch: Batch, row_sums: Callable[[Batch], Tensor]) -> tuple[Batch, dict[str, float]]:
        """Add the derivative of the loss by each row's sum, from the margins of all pairs."""
        pairs, mask = batch.pairs, batch.mask
        assert pairs is not None and batch.reference_logprobs is not None, "online DPO needs pairs and a reference"
        if not len(pairs.chosen):
            return replace(batch, row_factors=torch.zeros(len(mask), dtype=torch.float64)), {}
        length = mask.sum(1).clamp(min=1) if self.per_token else torch.ones(len(mask))
        reference = torch.where(mask, batch.reference_logprobs.double(), 0.0).sum(1) / length
        found = margins(row_sums(batch) / length, reference, pairs)
        loss, slopes = pair_loss_and_slope(found, self)
        share = pairs.weights / pairs.weights.sum()
        factors = torch.zeros(len(mask), dtype=torch.float64)
        factors.index_add_(0, pairs.chosen, share * slopes).index_add_(0, pairs.rejected, -share * slopes)
        low, middle, high = found.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        return replace(batch, row_factors=factors / length), {
            "update/loss": float(share @ loss),
            "update/margin/p05": low,
            "update/margin/p50": middle,
            "update/margin/p95": high,
            "update/margin/right/frac": float(share @ (found > 0).double()),
        }

    def active(self, batch: Batch) -> Tensor:
        assert batch.pairs is not None
        inside = torch.zeros(len(batch.mask), dtype=torch.bool)
        inside[batch.pairs.chosen] = inside[batch.pairs.rejected] = True
        return inside

    def micro_batch(
        self, logprobs: Tensor, part: Batch, values: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss sum_i (dL / ds_i) s_i of some rows."""
        assert part.row_factors is not None, "prepare comes first"
        sums = {"tokens": part.mask.sum(), "drift": ((logprobs - part.old_logprobs).detach() * part.mask).sum()}
        loss = (part.row_factors[:, None].to(logprobs.dtype) * torch.where(part.mask, logprobs, 0.0)).sum()
        return loss, sums, torch.zeros_like(part.mask)

    def metrics(self, sums: dict[str, float], batch: Batch) -> dict[str, float]:
        return {"update/drift/mean": sums["drift"] / max(sums["tokens"], 1)}


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows that are compared, all in one optimizer step."""

    chosen: Tensor  # int64 [P]
    rejected: Tensor  # int64 [P]
    weights: Tensor  # fp64 [P]: the pairs of a group sum to 1

    def rows(self, index: Tensor) -> Pairs:
        """The pairs with both members among some rows, as indices into these."""
        place = torch.full((max(int(t.max()) + 1 if len(t) else 0 for t in (self.chosen, self.rejected, index)),), -1)
        place[index] = torch.arange(len(index))
        chosen, rejected = place[self.chosen], place[self.rejected]
        assert bool(((chosen < 0) == (rejected < 0)).all()), "an optimizer step divides a pair"
        here = chosen >= 0
        return Pairs(chosen[here], rejected[here], self.weights[here])


def choose_pairs(
    rewards: Tensor, group: Tensor, members: Tensor, complete: Tensor, rule: str, stream: int
) -> tuple[Pairs, dict[str, float]]:
    """Choose which completions are compared; also returns metrics.

    rewards [N]; group int64 [N]; members bool [N]: who may be in a pair; complete bool [N]: who may be the chosen one,
    because its response ended by itself. Equal rewards make no pair. Among equally good or bad ones `stream` draws one.
    """
    rewards, draws = rewards.double(), uniform(torch.tensor(stream), torch.arange(len(rewards)))
    chosen, rejected, weights, ties = [], [], [], 0
    for number in group.unique().tolist():
        rows = ((group == number) & members).nonzero()[:, 0]
        winners = rows[complete[rows]]
        better = rewards[winners][:, None] > rewards[rows][None, :]  # [W, G]
        if not better.any():
            ties += 1
            continue
        if rule == "best-worst":
            best = _drawn(winners[rewards[winners] == rewards[winners].max()], draws)
            worst = _drawn(rows[rewards[rows] == rewards[rows].min()], draws)
            here = torch.tensor([[best, worst]])
        else:
            i, j = better.nonzero(as_tuple=True)
            here = torch.stack([winners[i], rows[j]], 1)
        chosen.append(here[:, 0])
        rejected.append(here[:, 1])
        weights.append(torch.full((len(here),), 1 / len(here), dtype=torch.float64))
    groups = ties + len(chosen)
    pairs = Pairs(
        torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64),
        torch.cat(rejected) if rejected else torch.zeros(0, dtype=torch.int64),
        torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64),
    )
    return pairs, {"pairs/total/count": float(len(pairs.chosen)), "pairs/groups_without/frac": ties / max(groups, 1)}


def _drawn(rows: Tensor, draws: Tensor) -> int:
    """One of some rows, drawn as the one with the smallest number."""
    return int(rows[draws[rows].argmin()])


def pair_loss(margins: Tensor, settings: DPO) -> Tensor:
    """The loss of every pair. margins h [P] -> [P]"""
    if settings.loss == "ipo":
        return (margins - 1 / (2 * settings.beta)) ** 2
    eps, scaled = settings.label_smoothing, settings.beta * margins
    return -(1 - eps) * logsigmoid(scaled) - eps * logsigmoid(-scaled)


def margins(sums: Tensor, reference_sums: Tensor, pairs: Pairs) -> Tensor:
    """h [P], from the sums of rows [N]."""
    gain = sums - reference_sums
    return gain[pairs.chosen] - gain[pairs.rejected]


def pair_loss_and_slope(margins: Tensor, settings: DPO) -> tuple[Tensor, Tensor]:
    """The loss of every pair, and its derivative by the margin. [P] -> [P], [P]"""
    leaf = margins.detach().double().requires_grad_()
    with torch.enable_grad():
        loss = pair_loss(leaf, settings)
        (slopes,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), slopes
