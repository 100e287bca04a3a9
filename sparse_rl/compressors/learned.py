"""learned: a small network per layer and KV head, trained on what evictions cost the model's own rollouts.

    score = slope * log importance + outer . silu(inner . x + bias)

`importance` is SnapKV's pooled attention of the last queries (snapkv.py), and x the features of a slot when its row is
full: key, value, range and norm of the value, norm of the key, age, whether it belongs to the prompt, and attention of
the last queries, pooled and not. Untrained it equals snapkv (slope 1, outer 0). `sparse-rl train-compressor`, or a run
whose recipe has `scorer.every` (train/joint.py), trains it (train/scorer.py) on the attention that each slot would have
received later (learn/regret.py). With `--features position` x is only place, age and prompt, and slope stays 0.

With a `temperature` evictions are drawn: the slots with the highest noise - score / temperature are evicted, with
Gumbel noise from the sequence's own stream, so that an eviction has a log-probability (train/actions.py).

The trace records what was evicted, so the learner never needs the network, and replay is exact however it is trained.

Shapes: L layers, N hidden units, F features, C candidates (slots before the window).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparseRLError
from ..models.companion import Companion, check_companion, companion_of, companions_of, set_companion
from ..models.shape import ModelShape
from ..streams import mix, uniform
from .base import CacheView, ScoreCompressor, register
from .snapkv import joint_attention

REMEDY = "run `sparse-rl train-compressor MODEL --task NAME`."
HIDDEN, POOL = 16, 7
KINDS = ("all", "position")
_LEAST = 1e-9  # attention, before its logarithm


@register
class Learned(ScoreCompressor):
    name = "learned"
    learns = "learned"
    window = 8
    copies = 8.0

    def __init__(self, *, temperature: float = 0.0, **options):
        """`temperature` above 0: evictions are drawn, slots of low scores first"""
        super().__init__(**options)
        if self.window < 1:
            raise SparseRLError(f"{self.name}: window {self.window} must be at least 1.")
        if not 0 <= temperature < math.inf:
            raise SparseRLError(f"{self.name}: temperature {temperature} must be 0 (nothing is drawn) or above.")
        self.num_queries, self.temperature = self.window, temperature
        self.scorer: Scorer | None = None

    def check_model(self, model: nn.Module) -> None:
        Scorer.of(model)

    def attach(self, model: nn.Module) -> None:
        self.scorer = Scorer.of(model)

    def score(self, view: CacheView) -> Tensor:
        assert self.scorer is not None and view.layer is not None, "an engine attaches the model"
        if view.keys.shape[2] <= self.window:
            return torch.zeros_like(view.feed, dtype=torch.float32)
        x = features(view, self.window, self.scorer.kind)
        scores = self.scorer.scores(x, view.layer)
        if self.temperature:  # what has the highest noise - score / temperature goes
            scores = scores - self.temperature * gumbel(view, scores.shape[-1])
        return F.pad(scores, (0, self.window))


class Scorer:
    """The networks of all layers and heads. Its tensors are those of the model's companion, and training changes them
    in place, between calls of the engine.
    """

    def __init__(self, companion: Companion):
        self.kind, self.tensors = companion.about["features"], companion.tensors

    @classmethod
    def of(cls, model: nn.Module) -> Scorer:
        companion = companion_of(model, "learned", REMEDY)
        if companion.about.get("features") not in KINDS:
            raise SparseRLError(f"learned.safetensors does not say which features it takes; {REMEDY}")
        check_companion("learned", companion, shapes_for(model, companion.about["features"]), REMEDY)
        device = next(model.parameters()).device
        companion.tensors.update({name: x.to(device, torch.float32) for name, x in companion.tensors.items()})
        return cls(companion)

    def scores(self, x: Tensor, layer: Tensor) -> Tensor:
        """x [B, H, C, F], layer [B] -> fp32 [B, H, C]"""
        return score_with({name: tensor[layer] for name, tensor in self.tensors.items()}, x)


def gumbel(view: CacheView, count: int) -> Tensor:
    """Noise of the first `count` slots, from the sequence's own stream, another at every eviction. -> fp32 [B, H, C]"""
    feed = view.feed.long()
    this_eviction = mix(view.streams[..., None] + feed[..., -1:])
    return -torch.log(-torch.log(uniform(this_eviction, feed[..., :count]))).float()


def score_with(network: dict[str, Tensor], x: Tensor) -> Tensor:
    """The formula. network: tensors of `shapes_for`, with [B, H] in front; x [B, H, C, F] -> [B, H, C]"""
    normal = (x - network["centre"][:, :, None]) / network["scale"][:, :, None]
    hidden = F.silu(normal @ network["inner"] + network["bias"][:, :, None])
    return (hidden @ network["outer"][..., None])[..., 0] + network["slope"][..., None] * x[..., -1]


def shapes_for(model: nn.Module, kind: str) -> dict[str, tuple[int, ...]]:
    shape = ModelShape.of(model.config, next(model.parameters()).dtype)
    if shape.latent or shape.by_layer:
        what = "latents in place of keys" if shape.latent else "other keys in some layers than in others"
        raise SparseRLError(f"{shape.architecture} keeps {what}, which `learned` cannot score; use another compressor.")
    place = shape.slot_layers, shape.heads
    count = 3 if kind == "position" else 2 * shape.head_dim + 7
    return {
        "centre": (*place, count),  # of the features
        "scale": (*place, count),
        "inner": (*place, count, HIDDEN),
        "bias": (*place, HIDDEN),
        "outer": (*place, HIDDEN),
        "slope": place,
    }


def fresh(model: nn.Module, kind: str = "all", seed: int = 0) -> Companion:
    """A scorer before its training: snapkv, or, of positions alone, one that keeps what is newest."""
    if kind not in KINDS:
        raise SparseRLError(f"features is {kind!r}; it must be one of {', '.join(KINDS)}.")
    shapes, device = shapes_for(model, kind), next(model.parameters()).device
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors["inner"] = torch.randn(shapes["inner"], generator=generator) / shapes["inner"][2] ** 0.5
    tensors["scale"] += 1.0
    tensors["slope"] += 1.0 if kind == "all" else 0.0
    return Companion({name: tensor.to(device) for name, tensor in tensors.items()}, {"features": kind})


def give_scorer(model: nn.Module, seed: int = 0) -> None:
    """Give a model a fresh scorer where it has none, so that it can be trained; one that it has is checked."""
    if "learned" not in companions_of(model):
        set_companion(model, "learned", fresh(model, seed=seed))
    Scorer.of(model)


def features(view: CacheView, window: int, kind: str) -> Tensor:
    """What the slots before the window show. -> fp32 [B, H, C, F]; the last one is log importance (of `all`)"""
    count = view.keys.shape[2] - window
    feed = view.feed[..., :count].float()
    age = torch.log1p(view.feed[..., -1:] - feed)
    prompt = view.is_prompt[..., :count].float()
    if kind == "position":
        return torch.stack([torch.log1p(feed), prompt, age], -1)
    assert view.values is not None
    keys, values = view.keys[:, :, :count].float(), view.values[:, :, :count].float()
    attention = joint_attention(view, window)
    pooled = F.max_pool1d(attention, POOL, stride=1, padding=POOL // 2)
    numbers = [
        (values.amax(-1) - values.amin(-1)).clamp(min=_LEAST).log(),
        values.norm(dim=-1).clamp(min=_LEAST).log(),
        keys.norm(dim=-1).clamp(min=_LEAST).log(),
        age,
        prompt,
        attention.clamp(min=_LEAST).log(),
        pooled.clamp(min=_LEAST).log(),
    ]
    return torch.cat([keys, values, torch.stack(numbers, -1)], -1)
