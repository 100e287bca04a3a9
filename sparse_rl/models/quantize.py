"""Quantise the base weights under adapters to 4 bits (QLoRA), with bitsandbytes: nf4, with quantised scales.

Every linear layer but the head is replaced by one that holds 4 bits per weight and dequantises it to the model's dtype
whenever it is called, forward and backward; only adapters are trained. The same weights always give the same 4 bits, so
files only hold adapters and the name of their base, and loading quantises the base again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ..errors import SparseRLError, nearest

QUANTIZE = ("4bit",)
BLOCK = 64  # weights that share a scale
_BYTES = (
    0.5 + 1 / BLOCK + 4 / (BLOCK * 256)
)  # of a weight: itself, its share of a block's scale, and of that scale's own


def check_quantize(value: str | None, key: str) -> None:
    """Refuse an unknown way to quantise."""
    if value is not None and value not in QUANTIZE:
        raise SparseRLError(f"{key} is {value!r}; {nearest(str(value), QUANTIZE)}")


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SparseRLError("4-bit weights need bitsandbytes: pip install 'sparse-rl[qlora]'.") from error
    return bitsandbytes


def quantised_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers to quantise, by name: all linear ones but the head."""
    head = cast(Any, model).get_output_embeddings()
    found = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    if not found:
        raise SparseRLError(
            f"{type(model).__name__} has no ordinary linear layers, so 4-bit weights would save nothing; set "
            "model.quantize to null."
        )
    return found


def quantise(model: nn.Module, device: str) -> None:
    """Replace a model's linear layers, one by one, by 4-bit ones on the device."""
    library = _bitsandbytes()
    for name, linear in quantised_layers(model).items():
        dtype, biased = linear.weight.dtype, linear.bias is not None
        quiet = {"compress_statistics": True, "quant_type": "nf4"}
        with torch.device("meta"):
            layer = library.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=biased, compute_dtype=dtype, **quiet
            )
        layer.weight = library.nn.Params4bit(linear.weight.data, requires_grad=False, **quiet)
        layer.support_avx512bf16_for_cpu = False  # on a CPU it would repack weights and then compute no gradients
        if biased:
            layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        _put(model, name, layer.to(device).train(linear.training))
        linear.weight = None  # pyright: ignore[reportAttributeAccessIssue]  # frees it before the next is made
    vars(model)["is_loaded_in_4bit"] = True  # tells peft


@torch.no_grad()
def dequantise(model: nn.Module) -> None:
    """Replace 4-bit layers by ordinary linear layers with the weights that they compute with."""
    library = _bitsandbytes()
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in modules:
        if isinstance(layer, library.nn.Linear4bit):
            weight = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            with torch.device("meta"):
                linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            linear.weight = nn.Parameter(weight.to(layer.compute_dtype))
            linear.bias = layer.bias
            _put(model, name, linear.train(layer.training))
    vars(model).pop("is_loaded_in_4bit", None)


def quantised_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a quantised model's weights, plus one dequantised matrix and one more in the backward pass."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = [layer.weight.numel() for layer in quantised_layers(model).values()]
    others = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return int(sum(sizes) * _BYTES) + (others + 2 * max(sizes)) * dtype.itemsize


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
