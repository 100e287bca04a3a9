"""The decode step of the Llama family with fused kernels: fewer launches, with the weights and the rounding of the
Hugging Face modules.

    x = embed(token)
    for each layer:  norm, [q k v], rotate + store + attend over slots, out, add + norm, [gate up], silu * up, down, add
    logits = head(norm(x))

Layers with experts (Qwen3-MoE, Mixtral) keep the model's own router and experts in place of the MLP, so that routes are
recorded as usual; experts.py chooses what computes the experts.

For one new token per row, the modules of transformers launch several times as many kernels, most of which read and
write a few kilobytes. Only models that are known to compute exactly this are accepted (`FusedForward.fits`). Any other
architecture, an adapter, a quantised layer or a module with hooks runs through its own modules, which are captured
just the same.

Projections that read the same input are one matrix product. Their weights are laid side by side in memory once, and
every parameter becomes a view of its part: still the learner's own tensor, updated in place, saved and loaded as
before. (A `state_dict` taken before the first rollout no longer follows the model; take it again.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..beacon import BeaconEmbedding
from ..cache import SlotCache
from ..cache.places import place_in
from ..kernels import ops
from ..models.logits import Float32Head
from ..models.routing import records_routes
from .decode import RowState

_HARMLESS_HOOKS = {"output_capturing_hook", "make_inputs_require_grads"}
_AS_MADE = {BeaconEmbedding: nn.Embedding, Float32Head: nn.Linear}  # our modules -> the ones that compute the same
_STEADY_ROPES = {"default", "linear", "llama3", "yarn"}  # others need the sequence length on the host


@dataclass(frozen=True)
class Product:
    """One or several linear layers that read the same input, as one matrix product."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def in_parts(self, x: Tensor) -> Tensor:
        """The product; if it has too few tiles to fill the chip, as parts of a sum over the inner dimension.

        The parts are fp32 [S, B, out]. The kernel that adds the result to the residual also adds the parts, in fp32.
        """
        may_split = ops.rules(x.device).splits_products and self.bias is None and x.dtype != torch.float32
        parts = parts_for(len(x), self.weight.shape[0], self.weight.shape[1]) if may_split else 1
        if parts == 1:
            return self(x)
        weight = self.weight.unflatten(1, (parts, -1)).permute(1, 2, 0)  # [S, in / S, out]
        return torch.bmm(x.unflatten(1, (parts, -1)).transpose(0, 1), weight, out_dtype=torch.float32)


def parts_for(rows: int, out: int, inner: int) -> int:
    """Into how many parts to cut a product's inner dimension. Measured on an H200, which 128 tiles of
    128 x 128 fill.
    """
    tiles = -(-rows // 128) * -(-out // 128)
    return next((s for s in (4, 2) if inner >= 4096 and inner % (8 * s) == 0 and s * tiles <= 128), 1)


@dataclass(frozen=True)
class Norm:
    weight: Tensor  # [N]
    eps: float


@dataclass(frozen=True)
class DenseMLP:
    gate_up: Product
    down: Product

    def __call__(self, x: Tensor) -> Tensor:
        """[B, N] -> [B, N], or the parts of a sum"""
        return self.down.in_parts(ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class ExpertsMLP:
    module: nn.Module  # the model's router and experts

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x[:, None])[:, 0]


@dataclass(frozen=True)
class Layer:
    before: Norm  # of attention
    after: Norm
    qkv: Product
    out: Product
    mlp: DenseMLP | ExpertsMLP
    norms: tuple[Tensor, Tensor, float] | None  # weights of the query and key norms, and epsilon; None: no such norms
    scaling: float


class FusedForward:
    """Computes logits after feeding a token to each of the first rows of a cache, like `forward_modules`."""

    def __init__(self, model: Any, cache: SlotCache):
        """model: one for which `fits` is true"""
        decoder = model.model
        self.cache, self.embed, self.rotary = cache, decoder.embed_tokens, decoder.rotary_emb
        self.norm, self.head = _norm(decoder.norm), model.lm_head
        self.layers = [_layer(layer) for layer in decoder.layers]
        for i, layer in enumerate(self.layers):
            cache.scaling[i] = layer.scaling

    @staticmethod
    def fits(model: Any, cache: SlotCache) -> bool:
        """Whether the model is known to compute exactly this, and the cache needs nothing that only its
        modules record.
        """
        if cache.shape.mass or not is_plain(model):
            return False
        config, layers = model.config, model.model.layers
        rope = getattr(config, "rope_parameters", None) or {}
        slides = any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in layers)
        slides = slides or (config.model_type in ("mistral", "mixtral") and config.sliding_window is not None)
        joint = [p for layer in layers for group in _joint(layer) for p in group]
        return (
            not slides
            and config.hidden_act == "silu"
            and rope.get("rope_type") in _STEADY_ROPES
            and rope.get("partial_rotary_factor", 1.0) == 1.0
            and len({id(p) for p in joint}) == len({p.data_ptr() for p in joint}) == len(joint)  # none is shared
            and all(_may_move(group) for layer in layers for group in _joint(layer))
        )

    def __call__(self, state: RowState, token: Tensor, position: Tensor, live: Tensor) -> Tensor:
        """token, position, live bool [B] -> logits [B, V]"""
        return self.head(self.states(state, token, position, live))  # in fp32 where the model's is

    def states(self, state: RowState, token: Tensor, position: Tensor, live: Tensor) -> Tensor:
        """The states from which the head computes logits. [B, hidden]"""
        cache, shape, width = self.cache, self.cache.shape, len(token)
        used, index = state.used[:width], state.index[:width]
        places = {stored.extra: place_in(stored.extra, used, index) for stored in cache.stored}
        residual = self.embed(token)  # [B, N]
        cos, sin = self.rotary(residual, position[:, None])
        rope = cos[:, 0], sin[:, 0]  # [B, D]
        x = ops.add_rms_norm(None, residual, self.layers[0].before.weight, self.layers[0].before.eps)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(x).view(width, -1, shape.key_dim)  # [B, Hq + 2 H, D]
            query, key, value = qkv.split([shape.query_heads, shape.heads, shape.heads], 1)
            x = ops.store_and_attend(
                query, key, value, cache.layer(i), places[shape.extra_of(i)], index, live, layer.scaling, rope,
                layer.norms,
            )  # fmt: skip
            x = layer.out(x)
            x = ops.add_rms_norm(x, residual, layer.after.weight, layer.after.eps)
            x = layer.mlp(x)
            norm = self.layers[i + 1].before if i + 1 < len(self.layers) else self.norm
            x = ops.add_rms_norm(x, residual, norm.weight, norm.eps)
        return x


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _layer(layer: Any) -> Layer:
    attention, (qkv, gate_up) = layer.self_attn, _projections(layer)
    query_norm, norms = getattr(attention, "q_norm", None), None
    if query_norm is not None:
        norms = query_norm.weight, attention.k_norm.weight, query_norm.variance_epsilon
    return Layer(
        before=_norm(layer.input_layernorm),
        after=_norm(layer.post_attention_layernorm),
        qkv=side_by_side(*qkv),
        out=side_by_side(attention.o_proj),
        mlp=DenseMLP(side_by_side(*gate_up), side_by_side(layer.mlp.down_proj)) if gate_up else ExpertsMLP(layer.mlp),
        norms=norms,
        scaling=attention.scaling,
    )


def _projections(layer: Any) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The projections that read attention's input, and those that read a dense MLP's; none for experts."""
    attention, mlp = layer.self_attn, layer.mlp
    dense = [] if hasattr(mlp, "experts") else [mlp.gate_proj, mlp.up_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj], dense


def _joint(layer: Any) -> list[list[Tensor]]:
    """Groups of a layer's parameters that should lie side by side."""
    projections = [linears for linears in _projections(layer) if linears]
    groups = [[linear.weight for linear in linears] for linears in projections]
    biases = [_biases(linears) for linears in projections]
    return groups + [group for group in biases if group]


def _biases(linears: Iterable[nn.Linear]) -> list[Tensor]:
    biases: Iterable[Tensor | None] = (linear.bias for linear in linears)
    return [bias for bias in biases if bias is not None]


def is_plain(model: nn.Module) -> bool:
    """Whether a model of this family is as transformers makes it: its own types of modules, none hooked or wrapped."""
    import transformers

    names = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral")
    family = {getattr(transformers, f"{name}ForCausalLM") for name in names}
    if type(model) not in family:
        return False
    try:
        with torch.device("meta"):
            fresh = type(model)(model.config)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        return False  # the config was changed and no longer describes a model
    ours = [(name, _AS_MADE.get(type(m), type(m))) for name, m in model.named_modules()]
    if ours != [(name, type(m)) for name, m in fresh.named_modules()]:
        return False
    hooks = [hook for m in model.modules() for hook in changing_hooks(m) if not records_routes(hook)]
    touched = bool(hooks) or any({"forward", "_hf_hook"} & vars(m).keys() for m in model.modules())
    return not touched and all(type(p) is nn.Parameter for p in model.parameters())


def changing_hooks(module: nn.Module) -> list:
    """A module's hooks, except two of transformers' own that change no value.

    One records hidden states when they are asked for, one marks embeddings for gradient checkpointing.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in hooks if not _is_harmless(hook)]


def _is_harmless(hook: Any) -> bool:
    of_transformers = str(getattr(hook, "__module__", "")).startswith("transformers.")
    return of_transformers and str(getattr(hook, "__qualname__", "")).split(".")[-1] in _HARMLESS_HOOKS


@torch.no_grad()
def side_by_side(*linears: nn.Linear) -> Product:
    """Lay the weights of linear layers side by side in memory, if they are not yet; their parameters become views."""
    weight, biases = _joined([linear.weight for linear in linears]), _biases(linears)
    assert len(biases) in (0, len(linears))
    return Product(weight, _joined(biases) if biases else None)


def _adjacent(parameters: list[Tensor]) -> bool:
    """Whether they lie side by side."""
    first = parameters[0]
    end = first.data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.data_ptr() == end):
            return False
        end += parameter.nbytes
    return True


def _may_move(parameters: list[Tensor]) -> bool:
    """Whether parameters may be moved: a part of something else, such as an optimizer's flat buffer, must stay."""
    return _adjacent(parameters) or all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)


def _joined(parameters: list[Tensor]) -> Tensor:
    """One tensor of all rows of the parameters; each parameter becomes a view of it."""
    first = parameters[0].data
    rows = [len(p) for p in parameters]
    if _adjacent(parameters):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    joined = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, joined.split(rows), strict=True):
        parameter.data = part
    return joined
