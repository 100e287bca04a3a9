"""Gradient checkpointing of a test's model in every form, what it keeps, and what runs."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from sparse_rl.learn.selective import keeping_products


def checkpoint(model, how: bool | str, rank: int = 0):
    """The model in train mode, with gradient checkpointing as `model.gradient_checkpointing` names it."""
    if how:
        options = {"use_reentrant": False}
        more = {"context_fn": keeping_products(rank)} if how == "selective" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={**options, **more})
    if rank:
        model.enable_input_require_grads()
    return model.train()


class Operations(TorchDispatchMode):
    """Counts torch's operations, and knows the memory that they made."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.counts[func.name() if hasattr(func, "_schema") else ""] += 1
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage()] = True
        return outputs

    def alive(self, model) -> int:
        """Bytes that are still there, the model's weights not counted."""
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(made.nbytes() for made in list(self.made) if made.data_ptr() not in weights)
