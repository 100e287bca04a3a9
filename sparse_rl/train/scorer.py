"""Train the compressor `learned` on regret: rollouts with it, a forward pass under each trace, and pairs of slots.

At every recorded eviction, the slots of the cache are rebuilt from the keys, values and queries of the forward pass.
The worth of a slot is the attention that later queries would have given it (learn/regret.py), and an oracle would keep
the worthiest. In pairs of a slot that the oracle keeps and one that it drops, the network learns to score the first
higher:

    loss = mean over pairs of  |worth_i - worth_j| / mean  *  softplus(score_j - score_i)

which is a convex stand-in for regret. Each round samples with the network of the round before, so it learns on slots
that its own choices leave. joint.py does the same between the steps of a run.

Shapes: L layers, H KV heads, E evictions, S slots, n pairs, F features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.segments import Observed
from ..compressors import CacheView, Compressor
from ..compressors.learned import Learned, features, score_with
from ..errors import SparseRLError
from ..learn.regret import Watch, mean_lost
from ..learn.score import hidden_states, replay_of, routes_of
from ..models import Companion, evaluating
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..streams import eviction_streams
from .actions import Actions, joined_actions, log_prob, policy_loss, rebuilt

TRAINED = ("inner", "bias", "outer", "slope")
AT_ONCE = 32  # evictions of a layer that are processed together


@dataclass(frozen=True)
class Pairs:
    """Pairs of slots of one layer, as features. The oracle keeps the first of each pair and drops the second."""

    kept: Tensor  # fp32 [H, n, F]
    dropped: Tensor  # fp32 [H, n, F]
    weight: Tensor  # fp32 [H, n]: how much more the first one is worth


@dataclass(frozen=True)
class Drawn:
    """How the evictions of a trajectory were drawn, if they are actions (actions.py)."""

    advantage: float
    evictions: int  # how many of them are learned from


class Collector(Watch):
    """Watches a forward pass under a trace, and draws pairs of slots at every eviction."""

    def __init__(self, trajectory: Trajectory, compressor: Learned, pairs: int, seed: int, drawn: Drawn | None = None):
        super().__init__(trajectory.trace)
        assert compressor.scorer is not None, "an engine has attached the model"
        self.compressor, self.kind, self.pairs = compressor, compressor.scorer.kind, pairs
        self.num_prompt_tokens = trajectory.num_prompt_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.found: dict[int, list[Pairs]] = {}
        self.actions: dict[int, list[Actions]] = {}
        self.drawn, self.acts = drawn, self._acts(drawn, seed)
        layers, heads, _ = self.evicted_at.shape
        self.streams = eviction_streams(torch.tensor([trajectory.stream or 0]), layers, heads)  # [L, 1, H]

    def _acts(self, drawn: Drawn | None, seed: int) -> set[int]:
        """The evictions whose log-probs are learned from, given by the first queries after them; a prompt's are not."""
        if drawn is None:
            return set()
        own = self.begins[self.begins > self.num_prompt_tokens]
        chosen = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed ^ 1))[: drawn.evictions]
        return set(own[chosen].tolist())

    def __call__(self, seen: Observed) -> None:
        super().__call__(seen)
        worth = self.received[seen.layer].flip(-1).cumsum(-1).flip(-1)  # [H, T, S]
        extra = self.compressor.extra_slots
        compressor = self.compressor.with_extra(extra[seen.layer] if extra else 0)
        gone, streams = self.evicted_at[seen.layer], self.streams[seen.layer]
        for begins in self._alike(gone):
            view = slots_at(seen, gone, begins, compressor, self.num_prompt_tokens, streams)
            if view is None:
                continue
            feed, device = view.feed.cpu(), view.keys.device
            if self.drawn is not None and begins[0] in self.acts:
                evicted = (gone == torch.tensor(begins)[:, None, None]).gather(2, feed).to(device)  # [E, H, S]
                action = rebuilt(view, evicted, compressor, self.drawn.advantage)
                self.actions.setdefault(seen.layer, []).append(action)
            segments = torch.searchsorted(self.begins, torch.tensor(begins))
            of_slots = worth[..., segments].permute(2, 0, 1).gather(2, feed).to(device)  # [E, H, S]
            if (drawn := self._draw(view, of_slots, compressor)) is not None:
                self.found.setdefault(seen.layer, []).append(drawn)

    def _alike(self, gone: Tensor) -> list[list[int]]:
        """A layer's evictions in batches of equally many slots, all of them actions or none. gone [H, T]

        An eviction is given by the first query after it.
        """
        begins = self.begins[(gone == self.begins[:, None, None]).any(-1).any(-1)]
        counts = present_at(gone, begins).sum(-1)  # [E, H]
        groups: dict[tuple[int, ...], list[int]] = {}
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            groups.setdefault((*count, begin in self.acts), []).append(begin)
        return [group[i : i + AT_ONCE] for group in groups.values() for i in range(0, len(group), AT_ONCE)]

    def _draw(self, view: CacheView, worth: Tensor, compressor: Learned) -> Pairs | None:
        """Draw pairs from evictions of one layer; None if there was nothing to choose. worth [E, H, S]"""
        window, budget = compressor.window, compressor.budget
        count = worth.shape[-1] - window
        forced = compressor.forced(view, budget).expand(view.feed.shape)[..., :count]  # sinks and prompt: first
        always, keep = int(forced.sum(-1).max()), min(budget - window, count - 1)
        if keep <= always:
            return None
        x, worth = features(view, window, self.kind), worth[..., :count]  # [E, H, C, F], [E, H, C]
        order = worth.masked_fill(forced, torch.inf).argsort(dim=-1, descending=True)
        shape = (*worth.shape[:2], self.pairs)
        first = order.gather(2, torch.randint(always, keep, shape, generator=self.generator).to(order.device))
        second = order.gather(2, torch.randint(keep, count, shape, generator=self.generator).to(order.device))
        weight = (worth.gather(2, first) - worth.gather(2, second)) / worth.sum(-1, keepdim=True).clamp(min=1e-12)
        wide = x.shape[-1]
        kept, dropped = (x.gather(2, i[..., None].expand(-1, -1, -1, wide)) for i in (first, second))
        return Pairs(*(part.transpose(0, 1).flatten(1, 2).cpu() for part in (kept, dropped, weight)))


def present_at(evicted_at: Tensor, begins: Tensor) -> Tensor:
    """Which tokens a row held at evictions before the queries `begins` [E]. evicted_at [H, T] -> bool [E, H, T]"""
    begins = begins[:, None, None]
    return (torch.arange(evicted_at.shape[1]) < begins) & (evicted_at >= begins)


def slots_at(
    seen: Observed,
    evicted_at: Tensor,
    begins: Sequence[int],
    compressor: Compressor,
    num_prompt_tokens: int,
    streams: Tensor | None = None,
) -> CacheView | None:
    """The view of a row's slots at evictions of equally many slots, given by the first queries after them; None if
    heads held different numbers of slots, or little more than the window.

    evicted_at [H, T]; streams [1, H]: random streams from which the evictions were drawn, if they were
    """
    many, device = len(begins), seen.keys.device
    present = present_at(evicted_at, torch.tensor(begins))  # [E, H, T]
    counts = present.sum(-1)
    if counts.min() != counts.max():
        return None
    feed = present.nonzero()[:, 2].view(*counts.shape, -1).to(device)  # [E, H, S]
    if feed.shape[2] <= compressor.window + 1:
        return None
    heads = torch.arange(len(evicted_at), device=device)[:, None]
    follows = torch.tensor(begins, device=device)
    observed = torch.arange(-min(compressor.num_queries, *begins), 0, device=device)  # [W]
    if streams is None:
        streams = torch.zeros(1, len(evicted_at), dtype=torch.int64)
    return CacheView(
        keys=seen.keys[0][heads, feed],
        values=seen.values[0][heads, feed],
        feed=feed,
        queries=seen.queries[0][:, follows[:, None] + observed].transpose(0, 1),
        mass=None,
        streams=streams.to(device).expand(many, -1),
        num_prompt_tokens=torch.tensor([num_prompt_tokens] * many, device=device),
        scaling=seen.scaling,
        softcap=seen.softcap,
        unreachable=None if seen.sliding_window is None else follows[:, None, None] - feed >= seen.sliding_window,
        layer=torch.tensor([seen.layer] * many, device=device),
    )


@dataclass(frozen=True)
class Collected:
    pairs: dict[int, Pairs]  # by layer
    lost: float  # mean share of attention that evicted tokens would have received; NaN if nothing was evicted
    actions: dict[int, Actions] = field(default_factory=dict)  # by layer


def collect(
    model: nn.Module, trajectories: Sequence[Trajectory], compressor: Learned, pairs: int, seed: int
) -> Collected:
    """Pairs of every layer from the evictions of some trajectories. compressor: the bound one that sampled them"""
    return merged([collect_from(model, t, compressor, pairs, seed + i) for i, t in enumerate(trajectories)])


@torch.no_grad()
def collect_from(
    model: nn.Module, trajectory: Trajectory, compressor: Learned, pairs: int, seed: int, drawn: Drawn | None = None
) -> Collected:
    """Pairs from one trajectory; with `drawn`, also actions from some of its evictions."""
    collector = Collector(trajectory, compressor, pairs, seed, drawn)
    replay = replay_of(model, [(trajectory.tokens, trajectory.trace)])
    replay.observe = collector
    with evaluating(model):
        tokens = trajectory.tokens.to(next(model.parameters()).device)
        hidden_states(model, tokens[None], replay, routes_of(model, trajectory.trace))
    lost = mean_lost(collector.regret())
    found = {layer: joined(parts) for layer, parts in collector.found.items()}
    actions = {layer: joined_actions(parts) for layer, parts in collector.actions.items()}
    return Collected(found, float("nan") if lost is None else float(lost), actions)


def merged(found: Sequence[Collected]) -> Collected:
    by_layer: dict[int, list[Pairs]] = {}
    for layer, pairs in (item for one in found for item in one.pairs.items()):
        by_layer.setdefault(layer, []).append(pairs)
    lost = [one.lost for one in found if not math.isnan(one.lost)]
    acted = sorted({layer for one in found for layer in one.actions})
    return Collected(
        {layer: joined(parts) for layer, parts in sorted(by_layer.items())},
        sum(lost) / len(lost) if lost else float("nan"),
        {layer: joined_actions([one.actions[layer] for one in found if layer in one.actions]) for layer in acted},
    )


def joined(parts: Sequence[Pairs]) -> Pairs:
    return Pairs(*(torch.cat([getattr(part, name) for part in parts], 1) for name in ("kept", "dropped", "weight")))


def stacked(parts: Sequence[Pairs]) -> Pairs:
    """Stack the pairs of all layers, equally many of each: [L, H, n, ...]"""
    return Pairs(*(torch.stack([getattr(part, name) for part in parts]) for name in ("kept", "dropped", "weight")))


def some_of(found: Iterable[Pairs], count: int, generator: torch.Generator) -> Pairs:
    """Draw `count` pairs of each layer."""
    parts = []
    for pairs in found:
        rows = torch.randint(0, pairs.weight.shape[1], (count,), generator=generator)
        parts.append(Pairs(pairs.kept[:, rows], pairs.dropped[:, rows], pairs.weight[:, rows]))
    return stacked(parts)


class ScorerTrainer:
    """Trains the networks of all layers in place; AdamW keeps its state from round to round."""

    def __init__(self, companion: Companion, lr: float = 3e-3, advantage: float = 0.0, temperature: float = 0.0):
        """advantage: weight of the actions' loss; temperature: at which their evictions were drawn"""
        self.companion, self.lr, self.advantage, self.temperature = companion, lr, advantage, temperature
        self.tensors = companion.tensors
        self.trained = [name for name in TRAINED if name != "slope" or companion.about["features"] == "all"]
        self.parameters = {name: nn.Parameter(self.tensors[name].float().clone()) for name in self.trained}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr, weight_decay=1e-4)

    def fit(
        self,
        found: dict[int, Pairs],
        steps: int,
        batch: int = 512,
        seed: int = 0,
        actions: Mapping[int, Actions] | None = None,
    ) -> tuple[float, float]:
        """Do some optimizer steps; returns the loss of pairs before and after, mean over layers and heads."""
        self._normalise(found)
        generator = torch.Generator().manual_seed(seed)
        before = self._whole(found)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self._loss([*found], some_of(found.values(), batch, generator)).sum().backward()
            for layer, acted in (actions or {}).items():
                (self.advantage * policy_loss(self.log_probs(layer, acted), acted)).backward()
            self.optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters.values()):
            raise SparseRLError(
                f"the scorer of `learned` is not finite after {steps} steps; lower its learning rate of {self.lr}."
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.tensors[name].copy_(parameter)
        return before, self._whole(found)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the networks' tensors by these, which another process has trained."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: tensor.cpu().clone() for name, tensor in self.tensors.items()}
        return {"tensors": tensors, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take(state["tensors"])
        self.optimizer.load_state_dict(state["optimizer"])

    def log_probs(self, layer: int, actions: Actions) -> Tensor:
        """The log-probs of evictions under the present networks. -> [n, H]"""
        device = self.tensors["centre"].device
        scores = score_with(self._networks([layer]), actions.x.to(device))
        return log_prob(scores, self.temperature, actions.possible.to(device), actions.count.to(device))

    def _networks(self, layers: Sequence[int]) -> dict[str, Tensor]:
        index = torch.tensor(layers, device=self.tensors["centre"].device)
        return {name: self.parameters.get(name, tensor)[index] for name, tensor in self.tensors.items()}

    def _loss(self, layers: Sequence[int], pairs: Pairs) -> Tensor:
        """The loss of pairs in each of these layers. pairs: [L, H, n, ...] -> [L]"""
        device, networks = self.tensors["centre"].device, self._networks(layers)
        margin = score_with(networks, pairs.kept.to(device)) - score_with(networks, pairs.dropped.to(device))
        weight = pairs.weight.to(device)
        weight = weight / weight.mean(-1, keepdim=True).clamp(min=1e-12)
        return (weight * F.softplus(-margin)).mean((1, 2))

    @torch.no_grad()
    def _whole(self, found: dict[int, Pairs]) -> float:
        return sum(float(self._loss([layer], stacked([pairs]))) for layer, pairs in found.items()) / len(found)

    def _normalise(self, found: dict[int, Pairs]) -> None:
        """Give every feature mean 0 and deviation 1, by the first slots that a layer shows."""
        for layer, pairs in found.items():
            if (self.tensors["scale"][layer] != 1).any():
                continue
            both = torch.cat([pairs.kept, pairs.dropped], 1)
            self.tensors["centre"][layer].copy_(both.mean(1))
            self.tensors["scale"][layer].copy_(both.std(1).clamp(min=1e-3))


@dataclass(frozen=True)
class Round:
    number: int
    trajectories: int
    lost: float  # share of attention that evicted tokens would have received; NaN if nothing was evicted
    before: float  # loss of the pairs
    after: float


def train_rounds(
    model: nn.Module,
    engine: Engine,
    prompts: Sequence[list[list[int]]],
    sampling: Sampling,
    companion: Companion,
    steps: int,
    pairs: int,
    seed: int,
) -> Iterator[Round]:
    """Rounds of sampling with the present compressor and then training it on these rollouts. prompts: ids, by round"""
    trainer, compressor = ScorerTrainer(companion), engine.compressor
    assert isinstance(compressor, Learned)
    for number, ids in enumerate(prompts):
        done = engine.generate(ids, sampling=sampling, seed=seed + number)
        found = collect(model, done, compressor, pairs, seed + 1000 * number)
        if not found.pairs:
            capacity = compressor.capacity(0, 0)
            raise SparseRLError(
                f"none of {len(done)} rollouts filled its {capacity} slots, so nothing was evicted; lower --budget, or "
                "raise --max-new-tokens."
            )
        before, after = trainer.fit(found.pairs, steps, seed=seed + number)
        yield Round(number + 1, len(done), found.lost, before, after)
