"""triattention: keep the keys that a calibration predicts later queries will attend to (arXiv 2604.04921).

Before RoPE the queries of a head lie around a centre. So the mean logit of a query that is `x` tokens away is a
trigonometric polynomial in x whose coefficients follow from that centre and the key. A calibration (`sparse-rl
calibrate`, learn/calibrate.py) measures for every query head, before RoPE, mu = the mean query and rho = the mean
modulus of its components. Then the score of a key k at time t (tokens fed) is

    trig  = mean over delta in 1, 2, 4, ..., 65536 of  <RoPE(mu, t + delta), k>      k as it is stored, after RoPE
    norm  = sum over components f of  (rho_f - |mu_f|) |k_f|
    score = trig + norm

A component is a pair of dimensions that RoPE rotates, or one dimension that it does not. The scores of a query head are
normalised over the candidates (mean 0, standard deviation 1), and the highest score of a KV head's query heads counts.
Each layer and KV head chooses independently. The authors' code adds noise of 1e-6 against ties, while ours prefers the
newer slot; theirs keeps the prompt by default, ours with `protect_prompt`.

Shapes: L layers, D head dim, Hq = H * G query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import SparseRLError
from ..models.companion import Companion, check_companion, companion_of
from ..models.shape import ModelShape
from .base import CacheView, ScoreCompressor, register

REMEDY = "run `sparse-rl calibrate MODEL --data FILE`."
OFFSETS = tuple(2**i for i in range(17))
GROUPS = ("max", "mean")


def shapes_for(layers: int, query_heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a calibration."""
    return {
        "mean": (layers, query_heads, dim),  # fp32: mu
        "modulus": (layers, query_heads, dim),  # fp32: rho, at both dimensions of a pair
        "frequency": (layers, dim),  # fp64: radians per token; 0 where RoPE does nothing
        "partner": (layers, dim),  # int64: the other dimension of a pair; the dimension itself where it is alone
    }


@register
class TriAttention(ScoreCompressor):
    name = "triattention"
    uses_values = False
    learns = "triattention"

    def __init__(self, *, group: str = "max", normalise: bool = True, **options):
        super().__init__(**options)
        if group not in GROUPS:
            raise SparseRLError(f"{self.name}: group is {group!r}; it must be one of {', '.join(GROUPS)}.")
        self.group, self.normalise = group, normalise
        self.calibration: Calibration | None = None

    def check_model(self, model: nn.Module) -> None:
        Calibration.of(model)

    def attach(self, model: nn.Module) -> None:
        self.calibration = Calibration.of(model)

    def score(self, view: CacheView) -> Tensor:
        assert self.calibration is not None and view.layer is not None, "an engine attaches the model"
        time = view.feed[:, 0, -1].long() + 1  # [B]: tokens fed; every head has the token fed last
        scores = self.calibration.predict(view.keys, view.layer, time)  # [B, H, G, S]
        if self.normalise:
            scores = _normalised(scores, self._candidates(view)[:, :, None])
        return scores.amax(2) if self.group == "max" else scores.mean(2)

    def _candidates(self, view: CacheView) -> Tensor:
        """Slots that may stay or go. bool [B, H, S]"""
        candidates = ~self.forced(view, self.budget).expand(view.feed.shape)
        return candidates if view.unreachable is None else candidates & ~view.unreachable


class Calibration:
    """A calibration's tensors (see `shapes_for`), on the model's device."""

    def __init__(self, companion: Companion, device: torch.device):
        mean, modulus, self.frequency, self.partner = (
            companion.tensors[name].to(device) for name in ("mean", "modulus", "frequency", "partner")
        )
        dims = torch.arange(self.partner.shape[-1], device=device)
        alone = self.partner == dims
        self.sign = torch.where(alone, 0, torch.where(dims < self.partner, -1, 1)).float()  # [L, D]
        self.mean = mean.float()
        self.weight = modulus.float() - components(self.mean, self.partner[:, None])  # rho - |mu|
        self.weight *= torch.where(alone, 1.0, 0.5)[:, None]  # both dimensions of a pair bring the pair's modulus

    @classmethod
    def of(cls, model: nn.Module) -> Calibration:
        companion = companion_of(model, "triattention", REMEDY)
        first = next(model.parameters())
        shape = ModelShape.of(model.config, first.dtype).cache_shape()
        expected = shapes_for(shape.layers, shape.query_heads, shape.key_dim)
        check_companion("triattention", companion, expected, REMEDY)
        partner = companion.tensors["partner"]
        valid = partner.dtype == torch.int64 and bool(((partner >= 0) & (partner < shape.key_dim)).all())
        if not valid or not partner.gather(1, partner).equal(torch.arange(shape.key_dim).expand_as(partner)):
            raise SparseRLError(f"triattention.safetensors pairs dimensions that do not belong together; {REMEDY}")
        return cls(companion, first.device)

    def predict(self, keys: Tensor, layer: Tensor, time: Tensor) -> Tensor:
        """keys [B, H, S, D], layer and time [B] -> fp32 [B, H, G, S]"""
        heads, keys = keys.shape[1], keys.float()
        towards = self._towards(layer, time).unflatten(1, (heads, -1))  # [B, H, G, D]
        sizes = components(keys, self.partner[layer][:, None, None])  # [B, H, S, D]
        weight = self.weight[layer].unflatten(1, (heads, -1))
        return towards @ keys.transpose(-1, -2) + weight @ sizes.transpose(-1, -2)

    def _towards(self, layer: Tensor, time: Tensor) -> Tensor:
        """The mean over offsets of RoPE(mu, t + delta). -> [B, Hq, D]"""
        moments = time[:, None] + torch.tensor(OFFSETS, device=time.device)  # [B, 17]
        angles = self.frequency[layer][:, None].double() * moments[..., None].double()  # up to 7e4 radians: in fp64
        cos, sin = (x.mean(1, keepdim=True).float() for x in (angles.cos(), angles.sin()))  # [B, 1, D]
        return turned(self.mean[layer], cos, sin, self.partner[layer][:, None], self.sign[layer][:, None])


def turned(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor, sign: Tensor) -> Tensor:
    """RoPE: each pair of dimensions is turned. All broadcast against x [..., D]; sign: -1, 1, or 0 for one alone."""
    return x * cos + sign * x.gather(-1, partner.expand_as(x)) * sin


def components(x: Tensor, partner: Tensor) -> Tensor:
    """The modulus of the component that each dimension belongs to. [..., D] -> [..., D]"""
    other = x.gather(-1, partner.expand_as(x))
    alone = partner == torch.arange(x.shape[-1], device=x.device)
    return torch.where(alone, x.abs(), torch.hypot(x, other))


def _normalised(scores: Tensor, candidates: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the candidates. scores [B, H, G, S], candidates bool [B, H, 1, S]"""
    count = candidates.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * candidates).sum(-1, keepdim=True) / count
    centred = scores - mean
    std = ((centred**2 * candidates).sum(-1, keepdim=True) / count).sqrt()
    return centred / std.clamp(min=1e-6)
