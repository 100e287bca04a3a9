"""Training the compressor `learned` on regret: rollouts with it, a forward pass under each trace, and pairs of slots.

At every recorded eviction the slots that were there are rebuilt from the keys, values and queries of the forward pass,
and each has a worth: the attention that later queries would have given it (learn/regret.py). The oracle keeps the
worthiest. Of pairs of a slot that it keeps and one that it does not, the network learns to score the first higher:

    loss = mean over pairs of  |worth_i - worth_j| / mean  *  softplus(score_j - score_i)

which is a convex stand-in for regret. Rollouts of the next round run with the network as it is then, so it learns on
the slots that its own choices leave.

Shapes: H KV heads, S slots, K pairs of an eviction, n pairs in all, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.segments import Observed
from ..compressors import CacheView, Compressor
from ..compressors.learned import Learned, features, score_with
from ..errors import SparseRLError
from ..learn.regret import Watch, summary
from ..learn.score import hidden_states, replay_of, routes_of
from ..models import Companion, evaluating
from ..records import Trajectory
from ..rollout import Engine, Sampling

TRAINED = ("inner", "bias", "outer", "slope")


@dataclass(frozen=True)
class Pairs:
    """Of one layer. The oracle keeps the first of each pair."""

    kept: Tensor  # fp32 [H, n, F]
    dropped: Tensor  # fp32 [H, n, F]
    weight: Tensor  # fp32 [H, n]: how much more the first is worth


class Collector(Watch):
    """Watches a forward pass under a trace, and draws pairs of slots at every eviction."""

    def __init__(self, trajectory: Trajectory, compressor: Learned, pairs: int, seed: int):
        super().__init__(trajectory.trace)
        assert compressor.scorer is not None, "an engine has attached the model"
        self.compressor, self.kind, self.pairs = compressor, compressor.scorer.kind, pairs
        self.num_prompt_tokens = trajectory.num_prompt_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.found: dict[int, list[Pairs]] = {}

    def __call__(self, seen: Observed) -> None:
        super().__call__(seen)
        worth = self.received[seen.layer].flip(-1).cumsum(-1).flip(-1)  # [H, T, S]
        extra = self.compressor.extra_slots
        compressor = self.compressor.with_extra(extra[seen.layer] if extra else 0)
        for segment, begin in enumerate(self.begins.tolist()):
            gone = self.evicted_at[seen.layer]
            view = slots_at(seen, gone, begin, compressor, self.num_prompt_tokens)
            if view is not None and (gone == begin).any():
                of_slots = worth[..., segment].gather(1, view.feed[0].cpu()).to(view.keys.device)  # [H, S]
                if (drawn := self._draw(view, of_slots, compressor)) is not None:
                    self.found.setdefault(seen.layer, []).append(drawn)

    def _draw(self, view: CacheView, worth: Tensor, compressor: Learned) -> Pairs | None:
        """None where nothing was to choose. worth [H, S]; compressor: of the layer"""
        window, budget = compressor.window, compressor.budget
        count = worth.shape[1] - window
        forced = compressor.forced(view, budget).expand(view.feed.shape)[0, :, :count]  # sinks and prompt: first
        always, keep = int(forced.sum(1).max()), min(budget - window, count - 1)
        if keep <= always:
            return None
        x, worth = features(view, window, self.kind)[0], worth[:, :count]  # [H, C, F], [H, C]
        order = worth.masked_fill(forced, torch.inf).argsort(dim=1, descending=True)
        shape = (len(worth), self.pairs)
        first = order.gather(1, torch.randint(always, keep, shape, generator=self.generator).to(order.device))
        second = order.gather(1, torch.randint(keep, count, shape, generator=self.generator).to(order.device))
        weight = (worth.gather(1, first) - worth.gather(1, second)) / worth.sum(1, keepdim=True).clamp(min=1e-12)
        wide = x.shape[-1]
        kept, dropped = (x.gather(1, i[..., None].expand(-1, -1, wide)) for i in (first, second))
        return Pairs(kept.cpu(), dropped.cpu(), weight.cpu())


def slots_at(
    seen: Observed, evicted_at: Tensor, begin: int, compressor: Compressor, num_prompt_tokens: int
) -> CacheView | None:
    """What a row held when it was evicted before query `begin`; None where heads held different numbers of slots, or
    little more than the window. evicted_at [H, T]
    """
    tokens = torch.arange(evicted_at.shape[1])
    present = (tokens < begin) & (evicted_at >= begin)  # [H, T]
    counts = present.sum(1)
    if counts.min() != counts.max():
        return None
    feed = present.nonzero()[:, 1].view(len(present), -1).to(seen.keys.device)  # [H, S]
    if feed.shape[1] <= compressor.window + 1:
        return None
    keys, values = (x[0].gather(1, feed[..., None].expand(-1, -1, x.shape[-1]))[None] for x in (seen.keys, seen.values))
    unreachable = None if seen.sliding_window is None else (begin - feed >= seen.sliding_window)[None]
    device = feed.device
    return CacheView(
        keys=keys,
        values=values,
        feed=feed[None],
        queries=seen.queries[:, :, max(0, begin - compressor.num_queries) : begin],
        mass=None,
        streams=torch.zeros(1, len(feed), dtype=torch.int64, device=device),
        num_prompt_tokens=torch.tensor([num_prompt_tokens], device=device),
        scaling=seen.scaling,
        softcap=seen.softcap,
        unreachable=unreachable,
        layer=torch.tensor([seen.layer], device=device),
    )


@dataclass(frozen=True)
class Collected:
    pairs: dict[int, Pairs]  # by layer
    lost: float  # mean share of attention that evicted tokens would have received


@torch.no_grad()
def collect(
    model: nn.Module, trajectories: Sequence[Trajectory], compressor: Learned, pairs: int, seed: int
) -> Collected:
    """Pairs of every layer, from the evictions of some trajectories. compressor: bound, as it sampled them"""
    found: dict[int, list[Pairs]] = {}
    lost: list[float] = []
    with evaluating(model):
        for number, trajectory in enumerate(trajectories):
            collector = Collector(trajectory, compressor, pairs, seed + number)
            replay = replay_of(model, [(trajectory.tokens, trajectory.trace)])
            replay.observe = collector
            tokens = trajectory.tokens.to(next(model.parameters()).device)
            hidden_states(model, tokens[None], replay, routes_of(model, trajectory.trace))
            for layer, parts in collector.found.items():
                found.setdefault(layer, []).extend(parts)
            if (about := summary(collector.regret())) is not None:
                lost.append(float(about[0]))
    return Collected(
        {layer: joined(parts) for layer, parts in found.items()}, sum(lost) / len(lost) if lost else float("nan")
    )


def joined(parts: Sequence[Pairs]) -> Pairs:
    return Pairs(*(torch.cat([getattr(part, name) for part in parts], 1) for name in ("kept", "dropped", "weight")))


class ScorerTrainer:
    """Trains the networks of all layers, in place; AdamW keeps its state from round to round."""

    def __init__(self, companion: Companion, lr: float = 3e-3):
        self.companion, self.lr = companion, lr
        self.tensors = companion.tensors
        self.trained = [name for name in TRAINED if name != "slope" or companion.about["features"] == "all"]
        self.parameters = {name: nn.Parameter(self.tensors[name].float().clone()) for name in self.trained}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr, weight_decay=1e-4)

    def fit(self, found: dict[int, Pairs], steps: int, batch: int = 512, seed: int = 0) -> tuple[float, float]:
        """-> the loss before and after, mean over layers and heads"""
        self._normalise(found)
        generator = torch.Generator().manual_seed(seed)
        before = self._whole(found)
        for _ in range(steps):
            self.optimizer.zero_grad()
            for layer, pairs in found.items():
                rows = torch.randint(0, pairs.weight.shape[1], (batch,), generator=generator)
                self._loss(layer, Pairs(pairs.kept[:, rows], pairs.dropped[:, rows], pairs.weight[:, rows])).backward()
            self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.tensors[name].copy_(parameter)
        return before, self._whole(found)

    def _loss(self, layer: int, pairs: Pairs) -> Tensor:
        device = self.tensors["centre"].device
        network = {name: (self.parameters.get(name, tensor))[layer][None] for name, tensor in self.tensors.items()}
        margin = score_with(network, pairs.kept[None].to(device)) - score_with(network, pairs.dropped[None].to(device))
        weight = pairs.weight.to(device)
        weight = weight / weight.mean(1, keepdim=True).clamp(min=1e-12)
        return (weight * F.softplus(-margin[0])).mean()

    @torch.no_grad()
    def _whole(self, found: dict[int, Pairs]) -> float:
        return sum(float(self._loss(layer, pairs)) for layer, pairs in found.items()) / len(found)

    def _normalise(self, found: dict[int, Pairs]) -> None:
        """Once: mean 0 and deviation 1 of every feature."""
        if (self.tensors["scale"] != 1).any():
            return
        for layer, pairs in found.items():
            both = torch.cat([pairs.kept, pairs.dropped], 1)
            self.tensors["centre"][layer].copy_(both.mean(1))
            self.tensors["scale"][layer].copy_(both.std(1).clamp(min=1e-3))


@dataclass(frozen=True)
class Round:
    number: int
    trajectories: int
    lost: float  # share of attention that evicted tokens would have received; NaN where nothing was evicted
    before: float  # the loss
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
    """Rounds of sampling with the compressor as it is, and of learning from that. prompts: ids, by round"""
    trainer, compressor = ScorerTrainer(companion), engine.compressor
    assert isinstance(compressor, Learned)
    for number, ids in enumerate(prompts):
        done = engine.generate(ids, sampling=sampling, seed=seed + number)
        found = collect(model, done, compressor, pairs, seed + 1000 * number)
        if not found.pairs:
            capacity = compressor.capacity(0, 0)
            raise SparseRLError(
                f"none of {len(done)} rollouts filled {capacity} slots, so nothing was evicted; lower --budget, or "
                "raise --max-new-tokens."
            )
        before, after = trainer.fit(found.pairs, steps, seed=seed + number)
        yield Round(number + 1, len(done), found.lost, before, after)
