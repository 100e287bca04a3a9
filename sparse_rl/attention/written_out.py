"""Models that write their attention out instead of calling transformers' attention interface, and decoders that count
positions themselves. For the length of a `with`, methods of their modules are replaced: on instances, never on classes.

`REPLACED` knows attention modules by the names of their classes. Most have a method of their own that makes attention
of queries, keys and values, and only that one is replaced; of the others the whole forward function is, made of the
module's own projections.

Shapes: B rows, T tokens, Hq query heads, H KV heads, D head dim.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparseRLError
from .alibi import Alibi
from .given import given

Attention = Callable[..., tuple[Tensor, None]]  # as of transformers' interface
Replacements = list[tuple[nn.Module, dict[str, Any]]]  # modules, and the attributes that they get


def replacements(model: nn.Module, attention: Attention) -> Replacements:
    """What lets modules that write their attention out call `attention`, and decoders have the positions given."""
    new: Replacements = []
    for number, module in enumerate(_written_out(model)):
        name, method = REPLACED[type(module).__name__]
        # Some have no number, or name it otherwise.
        new.append((module, {name: partial(method, module, attention), "layer_idx": number}))
    return new + [(table, {"forward": partial(_positions, table)}) for table in position_tables(model)]


@contextmanager
def replaced(new: Replacements) -> Iterator[None]:
    """Within the `with`, modules have what replaces their own."""
    before = [{name: vars(module)[name] for name in own if name in vars(module)} for module, own in new]
    try:
        for module, own in new:
            vars(module).update(own)
        yield
    finally:
        for (module, own), old in zip(new, before, strict=True):
            for name in own:
                vars(module).pop(name, None)
            vars(module).update(old)


def writes_out(new: Replacements) -> bool:
    """Whether some of the modules for which there are replacements write their attention out."""
    return any(_is(module, REPLACED) for module, _ in new)


def has_alibi(model: nn.Module) -> bool:
    return any(
        m.config.alibi if hasattr(m, "new_decoder_architecture") else _is(m, _ALIBI) for m in _written_out(model)
    )


def _written_out(model: nn.Module) -> list[Any]:
    """Attention modules in order, but for those that read an encoder, which decoders alone have and do not use."""
    return [m for name, m in model.named_modules() if _is(m, REPLACED) and not name.endswith("encoder_attn")]


def _is(module: nn.Module, names: Collection[str]) -> bool:
    return type(module).__name__ in names


def position_tables(model: nn.Module) -> list[nn.Embedding]:
    """Tables of positions that a decoder without `position_ids` reads from its first on (decoders of Bart's kind)."""
    named = [module for name, module in model.named_modules() if name.split(".")[-1] == "embed_positions"]
    return [module for module in named if isinstance(module, nn.Embedding) and _counts_itself(type(module))]


def check_positions(model: nn.Module) -> None:
    """Refuse a model that cannot be told where its tokens stand."""
    from transformers import PreTrainedModel

    outermost = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    if "position_ids" in inspect.signature(outermost.forward).parameters or position_tables(model):
        return
    if not any(_is(module, _ALIBI) for module in _written_out(model)):
        raise SparseRLError(
            f"{type(outermost).__name__} takes no position_ids, so it cannot be told where a token stands once others "
            "are evicted: this architecture is not supported."
        )


def _counts_itself(kind: type) -> bool:
    return "past_key_values_length" in inspect.signature(kind.forward).parameters


def _positions(table: Any, *args: Any, **kwargs: Any) -> Tensor:
    return F.embedding(given().positions + getattr(table, "offset", 0), table.weight)


def _merged(out: Tensor) -> Tensor:
    """[B, T, Hq, D] -> [B, T, Hq * D]"""
    return out.flatten(2)


def _split(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H * D] -> [B, H, T, D]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


# --------------------------------------------------------- methods that make attention of queries, keys and values


def _attn(scale: Callable[[Any], float], module: Any, attention: Attention, query, key, value, *_, **__):
    """[B, H, T, D] each -> ([B, H, T, D], None)"""
    dropout = module.attn_dropout.p if module.training else 0.0
    window = module.config.window_size if getattr(module, "attention_type", None) == "local" else None
    query, key = query.to(value.dtype), key.to(value.dtype)
    out, _ = attention(module, query, key, value, None, dropout, scaling=scale(module), sliding_window=window)
    return out.transpose(1, 2), None


def _attn_of_neox_japanese(module: Any, attention: Attention, query, key, value, *_, **__):
    dropout = module.attention_dropout.p if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=1 / module.norm_factor)
    return out.transpose(1, 2), None


# ------------------------------------------------------------------------------------------ whole forward functions


def _bart(module: Any, attention: Attention, hidden_states, *_, **kwargs):
    """Of Bart's kind (XGLM, MVP, TrOCR)"""
    if kwargs.get("key_value_states") is not None or kwargs.get("attn_prompt") is not None:
        raise SparseRLError(f"{type(module).__name__} attends to more than its tokens: that is not supported.")
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (_split(projection(hidden_states), module.head_dim) for projection in projections)
    dropout = module.dropout if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=module.scaling)
    return module.out_proj(_merged(out)), None


def _bert(module: Any, attention: Attention, hidden_states, *_, **kwargs):
    """Of Bert's kind (Megatron-BERT, RemBERT): another module projects what it returns"""
    if kwargs.get("encoder_hidden_states") is not None:
        raise SparseRLError(f"{type(module).__name__} attends to more than its tokens: that is not supported.")
    projections = (module.query, module.key, module.value)
    query, key, value = (_split(projection(hidden_states), module.attention_head_size) for projection in projections)
    dropout = module.dropout.p if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=module.attention_head_size**-0.5)
    return _merged(out), None


def _bloom(module: Any, attention: Attention, hidden_states, residual, *_, **__):
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    alibi = Alibi(_slopes(module, module.num_heads), hidden_states.dtype, module.beta)
    dropout = module.attention_dropout.p if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=module.inv_norm_factor, alibi=alibi)
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise SparseRLError("Bloom with slow_but_exact is not supported; set it to false in its config.json.")
    out = F.dropout(module.dense(_merged(out)), module.hidden_dropout, module.training)
    return residual + out, None


def _mpt(module: Any, attention: Attention, hidden_states, position_bias, *_, **__):
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_split(x, module.head_dim) for x in mixed.chunk(3, 2))
    alibi = Alibi(position_bias[:, 0, -1] - position_bias[:, 0, -2])
    dropout = module.attn_dropout_p if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=module.softmax_scale, alibi=alibi)
    return module.out_proj(_merged(out)), None


def _falcon(module: Any, attention: Attention, hidden_states, alibi, *_, position_embeddings=None, **__):
    query, key, value = module._split_heads(module.query_key_value(hidden_states))  # [B, T, heads, D] each
    if module.new_decoder_architecture:  # keys and values are repeated
        groups = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::groups], value[:, :, ::groups]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scale, biases, dropout = module.head_dim**-0.5, None, 0.0
    if alibi is None:
        assert position_embeddings is not None
        rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    else:
        biases = Alibi(_slopes(module, module.num_heads), torch.bfloat16, module.inv_norm_factor)
        dropout = module.attention_dropout.p if module.training else 0.0
    out, _ = attention(module, query, key, value, None, dropout, scaling=scale, alibi=biases)
    return module.dense(_merged(out)), None


def _slopes(module: nn.Module, heads: int) -> Tensor:
    """As the module's family computes them: of two tokens the second one's biases. [heads]"""
    build = importlib.import_module(type(module).__module__).build_alibi_tensor
    device = next(module.parameters()).device
    return build(torch.ones(1, 2, dtype=torch.int64, device=device), heads, torch.float32).view(heads, 2)[:, 1]


REPLACED: dict[str, tuple[str, Callable]] = {  # by class: the method that is replaced, and what replaces it
    "GPTJAttention": ("_attn", partial(_attn, lambda module: 1 / module.scale_attn)),
    "CodeGenAttention": ("_attn", partial(_attn, lambda module: 1 / module.scale_attn)),
    "GPTNeoSelfAttention": ("_attn", partial(_attn, lambda module: 1.0)),
    "GPTNeoXJapaneseAttention": ("_attn", _attn_of_neox_japanese),
    "XGLMAttention": ("forward", _bart),
    "MvpAttention": ("forward", _bart),
    "TrOCRAttention": ("forward", _bart),
    "MegatronBertSelfAttention": ("forward", _bert),
    "RemBertSelfAttention": ("forward", _bert),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "FalconAttention": ("forward", _falcon),
}
_ALIBI = {"BloomAttention", "MptAttention"}  # without positions: ours knows which slot holds which token
