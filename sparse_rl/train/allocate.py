"""Choose a budget for each layer, at equal memory, by measuring what evictions in that layer alone would cost.

On dense rollouts, the compressor chooses what each layer would evict at several budgets, from the keys and queries of
a dense pass. The cost of these evictions is measured in one of two ways:

    mass    the share of attention that later queries gave to evicted tokens (learn/regret.py), mean over KV heads
    nats    the log-prob that the rollout's tokens lose if only this layer evicts: an exact counterfactual

Rollouts are dense so that the mean of `nats` is a divergence from the dense policy: never negative, and 0 if nothing
that matters is lost. The costs of layers are assumed to add up, which holds to first order.

    choose b_0, ..., b_{L-1}  that minimise  sum over l of cost_l(b_l)   with   sum over l of b_l = L * budget

The measured costs of a layer are made non-increasing and replaced by their lower convex envelope, linear between the
budgets. With convex costs, giving slots one by one to the layer that gains most is optimal.

Shapes: L layers, H KV heads, T tokens, S segments, N budgets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cache import Trace
from ..cache.segments import Observed
from ..compressors import CacheView, Compressor
from ..compressors.base import choose
from ..errors import SparseRLError
from ..learn.regret import counterfactuals, received
from ..learn.score import hidden_states, replay_of, routes_of
from ..models import evaluating
from ..records import Trajectory
from ..streams import eviction_streams
from .scorer import slots_at

MEASURES = ("mass", "nats")
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)  # of the budget, at which costs are measured


def grid_of(budget: int, least: int) -> list[int]:
    """The budgets at which costs are measured, none below `least`."""
    if not 1 <= least <= budget:
        raise SparseRLError(f"least is {least}, but the budget is {budget}; give a number from 1 to {budget}.")
    return sorted({least, *(max(least, round(budget * share)) for share in SHARES)})


def moments_of(compressor: Compressor, prompt: int, tokens: int) -> list[int]:
    """The first query after each eviction of a rollout in which all layers have this budget."""
    if not compressor.evicts_response:
        return [prompt] if compressor.evicts_prompt(prompt) else []
    return [*range(max(prompt, compressor.capacity(0, 0)), tokens - 1, compressor.interval)]


@dataclass(frozen=True)
class Allocation:
    layers: list[int]  # slots that each layer keeps
    cost: float  # of these budgets, as measured
    equal: float  # cost of the same budget in all layers
    by_layer: list[float]  # cost of the same budget, as measured in each layer


def choose_budgets(
    model: nn.Module,
    rollouts: Sequence[Trajectory],
    compressor: Compressor,
    measure: str = "nats",
    least: int | None = None,
    step: int = 1,
) -> Allocation:
    """Choose budgets by layer, with the compressor's budget as their mean. An engine must have attached the compressor.

    least: slots that every layer keeps; by default half of the budget, or what the compressor needs for these prompts
    """
    prompt = max(t.num_prompt_tokens for t in rollouts) if compressor.protect_prompt else 0
    least = max(compressor.budget // 2, compressor.smallest_budget(prompt)) if least is None else least
    budgets = grid_of(compressor.budget, least)
    cost = costs(model, rollouts, compressor, budgets, measure)
    layers = allocate(cost, budgets, compressor.budget, step)
    curves = [envelope(budgets, row.tolist()) for row in cost]
    chosen = sum(curve_at(curve, own) for curve, own in zip(curves, layers, strict=True))
    equal = sum(curve_at(curve, compressor.budget) for curve in curves)
    return Allocation(layers, chosen, equal, cost[:, budgets.index(compressor.budget)].tolist())


class Choices:
    """Watches a dense pass over a rollout (`Replay.observe`) and notes what each layer would evict at every budget."""

    def __init__(self, trajectory: Trajectory, bound: Sequence[Compressor], stream: int):
        """bound: the compressor, bound to each budget"""
        layers, heads, tokens = trajectory.trace.evicted_at.shape
        self.bound, self.prompt = bound, trajectory.num_prompt_tokens
        self.moments = [moments_of(compressor, self.prompt, tokens) for compressor in bound]
        self.begins = torch.tensor(sorted({0}.union(*self.moments)))
        self.received = torch.zeros(layers, heads, tokens, len(self.begins))
        self.passes = torch.zeros(layers)
        self.streams = eviction_streams(torch.tensor([stream]), layers, heads)  # [L, 1, H]
        self.evicted_at = torch.full((len(bound), layers, heads, tokens), tokens)  # never, within the rollout

    def __call__(self, seen: Observed) -> None:
        layer, heads = seen.layer, self.received.shape[1]
        found = received(seen, self.begins, heads).cpu()
        if not self.passes[layer]:  # of layers that share slots, the first one chooses
            own = min(heads, seen.keys.shape[1])  # of a layer with fewer KV heads than the trace, which repeats them
            first = found[:: heads // own]
            so_far = (first.cumsum(-1) - first) * (seen.queries.shape[1] // own)  # of each token before a segment
            for number, compressor in enumerate(self.bound):
                for begin in self.moments[number]:
                    segment = int(torch.searchsorted(self.begins, begin))
                    gone = self.evicted_at[number, layer, :: heads // own]
                    self._evict(seen, compressor, gone, begin, so_far[..., segment])
                    self.evicted_at[number, layer] = gone.repeat_interleave(heads // own, 0)
        self.received[layer] += found
        self.passes[layer] += 1

    def _evict(self, seen: Observed, compressor: Compressor, gone: Tensor, begin: int, mass: Tensor) -> None:
        """Evict once before query `begin`: mark the evicted tokens in `gone`. gone, mass: [H, T]"""
        view = self._view(seen, compressor, gone, begin, mass)
        if view is None or view.feed.shape[2] <= compressor.budget:
            return
        stays = torch.zeros_like(view.feed[0], dtype=torch.bool)
        stays.scatter_(1, choose(compressor, view, compressor.budget)[0], True)
        lost = torch.zeros_like(gone, dtype=torch.bool).scatter(1, view.feed[0].cpu(), ~stays.cpu())
        gone[lost] = begin

    def _view(self, seen: Observed, compressor: Compressor, gone: Tensor, begin: int, mass: Tensor) -> CacheView | None:
        view = slots_at(seen, gone, [begin], compressor, self.prompt)
        if view is None:
            return None
        device = view.keys.device
        of_slots = mass.gather(1, view.feed[0].cpu())[None].to(device) if compressor.uses_mass else None
        return replace(view, streams=self.streams[seen.layer, :, : len(gone)].to(device), mass=of_slots)

    @property
    def mass(self) -> Tensor:
        """Mean attention that a query loses to evictions, by budget, layer and KV head. [N, L, H]"""
        received = self.received / self.passes.clamp(min=1)[:, None, None, None]
        gone = self.begins >= self.evicted_at[..., None]  # [N, L, H, T, S]
        return (received * gone).sum((-1, -2)) / (self.evicted_at.shape[-1] - 1)


@torch.no_grad()
def costs(
    model: nn.Module, rollouts: Sequence[Trajectory], compressor: Compressor, budgets: Sequence[int], measure: str
) -> Tensor:
    """What each budget costs in each layer alone, mean over dense rollouts. -> fp64 [L, N]

    compressor: one that an engine has attached to the model
    """
    if measure not in MEASURES:
        raise SparseRLError(f"costs are measured by {measure!r}; it must be one of {', '.join(MEASURES)}.")
    bound = [compressor.on_average().bind(budget, compressor.interval) for budget in budgets]
    found = []
    with evaluating(model):
        for number, trajectory in enumerate(rollouts):
            watch = Choices(trajectory, bound, number)
            tokens = trajectory.tokens.to(next(model.parameters()).device)
            replay = replay_of(model, [(tokens, trajectory.trace)])
            replay.observe = watch
            hidden_states(model, tokens[None], replay, routes_of(model, trajectory.trace))
            found.append(watch.mass.mean(-1).T if measure == "mass" else _nats(model, trajectory, watch.evicted_at))
    cost = torch.stack([part.double() for part in found]).mean(0)
    if not bool((cost[:, 0] > 0).any()):
        raise SparseRLError(
            f"evictions cost nothing in {len(rollouts)} rollouts, even with a budget of {budgets[0]}, so layers cannot "
            "be compared; lower the budget, or sample longer responses."
        )
    return cost


def _nats(model: nn.Module, trajectory: Trajectory, evicted_at: Tensor) -> Tensor:
    """Log-prob that a response token loses on average if only one layer evicts. evicted_at [N, L, H, T] -> [L, N]"""
    dense, tokens = trajectory.trace, len(trajectory.tokens)
    counts, layers = evicted_at.shape[:2]
    others: list[Trace] = []
    for layer in range(layers):
        for number in range(counts):
            own, gone = dense.evicted_at.clone(), evicted_at[number, layer]
            own[layer] = torch.where(gone < tokens, gone, own[layer].long()).to(own.dtype)
            others.append(replace(dense, evicted_at=own))
    change = counterfactuals(model, trajectory.tokens, dense, others)[:, trajectory.num_prompt_tokens :]
    return -change.double().mean(-1).view(layers, counts)


def allocate(cost: Tensor, budgets: Sequence[int], budget: int, step: int = 1) -> list[int]:
    """The cheapest budgets by layer whose mean is `budget`. cost [L, N], at ascending `budgets`

    step: slots given at a time; with a larger step more layers have the same budget and are evicted together
    """
    curves = [envelope(budgets, row.tolist()) for row in cost]
    chosen = [budgets[0]] * len(curves)
    left = budget * len(curves) - sum(chosen)
    while left:
        given = min(step, left)
        gains = [curve_at(curve, have) - curve_at(curve, have + given) for curve, have in zip(curves, chosen)]
        best = max(range(len(chosen)), key=lambda layer: (gains[layer], -chosen[layer], -layer))
        chosen[best] += given
        left -= given
    return chosen


def envelope(budgets: Sequence[int], cost: Sequence[float]) -> list[tuple[int, float]]:
    """The corners of the costs' lower envelope: the largest convex, non-increasing function nowhere above them."""
    corners: list[tuple[int, float]] = []
    lowest = float("inf")
    for x, y in zip(budgets, cost, strict=True):
        lowest = min(lowest, y)
        while len(corners) > 1 and _above(corners[-2], corners[-1], (x, lowest)):
            corners.pop()
        corners.append((x, lowest))
    return corners


def _above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Whether the middle corner lies on or above the line through the others."""
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (y1 - y0) * (x2 - x0) >= (y2 - y0) * (x1 - x0)


def curve_at(corners: Sequence[tuple[int, float]], x: int) -> float:
    """The envelope's cost at x slots: linear between corners, and constant beyond the last one."""
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return corners[-1][1]
