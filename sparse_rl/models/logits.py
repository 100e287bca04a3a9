"""Get fp32 logits from a bf16 head: its product is summed in fp32 anyway, so the result need not be rounded.

    logits = x W^T      x [n, hidden], W [V, hidden] in the model's dtype; logits [n, V] in fp32

Rounding logits of size 25 to bf16 changes log-probs by 0.02 on average, and sampler and learner round differently. The
head module itself returns fp32, so decoding, scoring, loss and every other caller of the model see the same logits, and
the model's own scales and soft-caps are computed in fp32, too. The weights keep their dtype: as parameters, in files,
in adapters and in shards.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparseRLError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = ("float32", "model")  # fp32, or the model's dtype
_BLOCK = 2**18  # weights that a CPU converts at a time: 1 MiB of fp32, which stays in its cache


class Float32Head(nn.Linear):
    """A linear layer (the same parameters) whose output is fp32, whatever the dtype of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., hidden] -> fp32 [..., V]"""
        if self.weight.dtype == torch.float32:
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1]).to(self.weight.dtype)  # autocast may leave them in fp32
        logits = _Product.apply(rows, self.weight).view(*input.shape[:-1], self.out_features)
        return logits if self.bias is None else logits + self.bias.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        """x [n, hidden], weight [V, hidden] -> fp32 [n, V]"""
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return wide_product(x, weight)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """grad_outputs: fp32 [n, V]. On a GPU it is rounded to the weights' dtype, as for an ordinary head."""
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        dtype = weight.dtype if grad.is_cuda else torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.to(dtype)
            to_x = (grad @ weight.to(dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None  # [n, hidden]
            to_weight = (grad.t() @ x.to(dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None  # [V, hidden]
        return to_x, to_weight


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32, or in a wider dtype of x and W. x [n, hidden], W [V, hidden], of one dtype -> [n, V]"""
    if weight.dtype.itemsize >= 4:
        return F.linear(x, weight)
    if x.is_cuda and len(x):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    size = max(64, _BLOCK // weight.shape[1])
    return torch.cat([F.linear(x.float(), part.float()) for part in weight.split(size)], 1)


def set_logits(model: nn.Module, dtype: str = "float32") -> nn.Module:
    """Let the model's head return logits in fp32, or (`model`) in its own dtype again; an fp32 head is not changed."""
    check_logits(dtype)
    head = head_of(model)
    if dtype == "model":
        if type(head) is Float32Head:
            head.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    elif type(head) is nn.Linear and "forward" not in vars(head):
        if head.weight.dtype != torch.float32:
            head.__class__ = Float32Head
    elif not isinstance(head, Float32Head):
        warnings.warn(
            f"the head of {type(model).__name__} is a {type(head).__name__}, which cannot give logits in fp32; its "
            "logits keep the model's dtype. Set logits to `model` to accept that.",
            stacklevel=2,
        )
    return model


def check_logits(dtype: str, key: str = "logits") -> None:
    """Refuse a dtype of logits that is not known."""
    if dtype not in LOGITS:
        raise SparseRLError(f"{key} is {dtype!r}; it must be float32, or model (logits in the model's own dtype).")


def head_of(model: nn.Module) -> nn.Module | None:
    """The module that makes logits; if an adapter wraps it, the module inside."""
    head = cast("PreTrainedModel", model).get_output_embeddings()
    return getattr(head, "base_layer", head)
