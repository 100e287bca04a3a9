"""Selective gradient checkpointing: a layer keeps what is expensive to compute, and computes the rest again.

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keeping_products()})

Kept are the outputs of matrix products and of attention. Norms, activations, rotations, gates, casts and sums are
computed again in the backward pass, by the operations of the forward pass, so gradients have the same bits.

The choice is made by torch's operations, as they arrive below autograd. So it also reaches products inside of
autograd functions (4-bit weights). Our attention under a trace is one such operation (kernels/segments.py). Our other
kernels are not; they compute cheap things and run again. What is computed again, too:

- an adapter's second product, which costs as little as its rank says, but whose output is as wide as the layer's,
- attention written out in torch (soft-caps, sinks): its logits take tokens x tokens,
- what a model changes in place after it was computed (gpt-oss adds biases to its experts' products),
- FlexAttention, scans of recurrent layers, and every kernel that is not listed below.

torch's own selective checkpointing (create_selective_checkpoint_contexts) refuses what is changed in place.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}  # and which argument is the left factor
_KEPT = {
    "aten::_grouped_mm",  # experts
    "transformers::grouped_mm_fallback",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "sparse_rl::segment_attention",
}


def keeping_products(rank: int = 0) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """The `context_fn` of torch's checkpoint: contexts of a layer's forward pass and of computing it again.

    rank: the largest of the adapters; products with an inner dimension of at most this are not kept
    """
    return functools.partial(_contexts, rank)


def _contexts(rank: int) -> tuple[AbstractContextManager, AbstractContextManager]:
    kept: deque[_Kept] = deque()
    return _Keep(rank, kept), _Give(rank, kept)


class _Kept:
    """The outputs of an operation, as long as nothing changes them."""

    def __init__(self, operation: Any, outputs: Any):
        self.operation, self.is_one = operation, isinstance(outputs, Tensor)
        # detached, because autograd's node of an output would lead back to the layer that keeps it
        every = (outputs,) if self.is_one else outputs
        self.outputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in every)
        self.storages = _storages(every)

    def drop(self) -> None:
        self.outputs, self.storages = None, set()


class _Mode(TorchDispatchMode):
    def __init__(self, rank: int, kept: deque[_Kept]):
        super().__init__()
        self.rank, self.kept = rank, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions, such as FlexAttention, stay compiled; they are computed again


class _Keep(_Mode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if is_expensive(func, args, self.rank):
            self.kept.append(_Kept(func, outputs))
        elif self.kept and _changes(func):
            changed = _storages(tree_leaves((args, kwargs)))
            for kept in self.kept:
                if kept.storages & changed:
                    kept.drop()
        return outputs


class _Give(_Mode):
    def __exit__(self, *exception):
        self.kept.clear()  # what is computed once more (retain_graph) is computed as a whole
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_expensive(func, args, self.rank) and self.kept:
            kept = self.kept.popleft()
            assert kept.operation is func, "a layer runs the same operations when it is computed again"
            if kept.outputs is not None:
                return kept.outputs[0] if kept.is_one else kept.outputs
        return func(*args, **(kwargs or {}))


def _storages(values: Iterable[Any]) -> set[int]:
    """Where the numbers of the tensors among some values are."""
    return {x.untyped_storage().data_ptr() for x in values if isinstance(x, Tensor)}


def is_expensive(operation: Any, args: tuple, rank: int) -> bool:
    """Whether the outputs of one of torch's operations are kept."""
    name = _name(operation)
    return args[_PRODUCTS[name]].shape[1] > rank if name in _PRODUCTS else name in _KEPT


@functools.cache
def _name(operation: Any) -> str:
    schema = getattr(operation, "_schema", None)  # operations of higher order have none
    return "" if schema is None else operation.name()


@functools.cache
def _changes(operation: Any) -> bool:
    """Whether an operation changes its arguments in place."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.is_mutable
