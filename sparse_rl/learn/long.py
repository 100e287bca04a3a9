"""Train on long rows: what layers keep for their backward pass goes to host memory, and MLPs run by chunks.

    use_long_rows(model)                # `model.gradient_checkpointing: offload`
    with long_rows(model):
        loss(model).backward()

Gradient checkpointing keeps one input per layer. Here this input is copied to host memory (pinned on a GPU, by a
separate stream) as soon as the layer has begun, and copied back while the layer after it is still in its backward pass.

An MLP treats every token separately, so chunks of tokens pass through it one after the other, and only its input is
kept. Each chunk is computed again in its own backward pass. Checkpointing then need not compute the MLP again: it stops
as soon as it has the MLP's input, unless the layer has a norm behind its MLP (Gemma).

No class is patched: instances of known modules get other functions within the `with`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ..models import MLP_CHUNK

_FLAG = "sparse_rl_long_rows"
# Modules with one tensor in and one out that treat every token separately.
_FAMILIES = {
    **{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3", "olmo2": "Olmo2"},
    **{"gemma2": "Gemma2", "gemma3": "Gemma3", "smollm3": "SmolLM3"},
}
_KNOWN = {f"transformers.models.{room}.modeling_{room}.{name}MLP" for room, name in _FAMILIES.items()}


def use_long_rows(model: nn.Module) -> None:
    """Let `long_rows` work on this model; its gradient checkpointing must be on."""
    vars(model)[_FLAG] = True


@contextmanager
def long_rows(*models: nn.Module | None) -> Iterator[None]:
    """Within the `with`, let the layers of models that asked for it keep their inputs on the host and run MLPs by
    chunks.

    The `with` must include backward, and be inside that of `fused`.
    """
    undo: list[Callable[[], None]] = []
    try:
        for model in models:
            if model is None or _FLAG not in vars(model):
                continue
            host = Host()
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False) and "_gradient_checkpointing_func" in vars(module):
                    undo.append(_replace(module, "_gradient_checkpointing_func", host.keeping))
                elif f"{type(module).__module__}.{type(module).__qualname__}" in _KNOWN:
                    undo.append(_replace(module, "forward", lambda own, m=module: by_chunks(m, own, MLP_CHUNK)))
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _replace(module: nn.Module, name: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function of an instance by a changed one; returns a function that undoes it."""
    before = dict(vars(module))
    vars(module)[name] = change(getattr(module, name))

    def restore() -> None:
        if name in before:
            vars(module)[name] = before[name]
        else:
            del vars(module)[name]

    return restore


class Kept:
    """A tensor on the host, and the one that was kept before it, which backward needs next."""

    def __init__(self, host: Tensor, device: torch.device, before: Callable[[], Kept | None]):
        self.host, self.device, self.before = host, device, before
        self.fetched: Tensor | None = None


class Host:
    """Keeps inputs of checkpointed layers in host memory."""

    def __init__(self):
        self.stream: Any = None  # for copies, on a GPU
        self.last: Callable[[], Kept | None] = lambda: None

    def keeping(self, checkpoint: Callable) -> Callable:
        """A checkpointing function for a layer that keeps the layer's input on the host."""

        def call(function: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            def pack(tensor: Tensor) -> Tensor | Kept:
                is_input = tensor.shape == x.shape and tensor.dtype == x.dtype
                return self.put(tensor) if is_input else tensor

            def unpack(kept: Tensor | Kept) -> Tensor:
                return self.take(kept) if isinstance(kept, Kept) else kept

            with saved_tensors_hooks(pack, unpack):
                return checkpoint(function, x, *args, **kwargs)

        return call

    def put(self, tensor: Tensor) -> Kept:
        on_gpu = tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        if on_gpu:
            self.stream = self.stream or torch.cuda.Stream(tensor.device)
            self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self.stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
        else:
            host.copy_(tensor)
        kept = Kept(host, tensor.device, self.last)
        self.last = weakref.ref(kept)  # weak, so that it lives only as long as backward needs it
        return kept

    def take(self, kept: Kept) -> Tensor:
        if kept.device.type != "cuda":
            return kept.host
        tensor = kept.fetched if kept.fetched is not None else self._fetch(kept)
        kept.fetched = None
        current = torch.cuda.current_stream(kept.device)
        current.wait_stream(self.stream)
        tensor.record_stream(current)
        if (before := kept.before()) is not None and before.fetched is None:
            before.fetched = self._fetch(before)
        return tensor

    def _fetch(self, kept: Kept) -> Tensor:
        with torch.cuda.stream(self.stream):
            return kept.host.to(kept.device, non_blocking=True)


def by_chunks(module: nn.Module, own: Callable[[Tensor], Tensor], chunk: int) -> Callable[[Tensor], Tensor]:
    """An MLP's forward function, `chunk` tokens at a time. own: the function for some of the tokens"""

    def forward(x: Tensor) -> Tensor:
        if x.shape[:-1].numel() <= chunk:
            return own(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _over_chunks(own, x, chunk)
        kept = _Keep.apply(x)
        trained = [p for p in module.parameters() if p.requires_grad]
        return _Chunked.apply(own, chunk, kept.grad_fn, kept, *trained)

    return forward


def _over_chunks(own: Callable[[Tensor], Tensor], x: Tensor, chunk: int) -> Tensor:
    """x [..., N] -> [..., N]"""
    return torch.cat([own(part) for part in x.reshape(1, -1, x.shape[-1]).split(chunk, 1)], 1).view(x.shape)


class _Keep(torch.autograd.Function):
    """The identity, which saves its input. The chunks' backward reads it from here, so that checkpointing, when it
    computes a layer again, has everything before it reaches the MLP.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, chunk, keeper, x, *trained):
        ctx.own, ctx.chunk, ctx.keeper, ctx.trained = own, chunk, keeper, trained
        return _over_chunks(own, x, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.keeper.saved_tensors
        width = x.shape[-1]
        to_x = []
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.trained]
        parts = (tensor.reshape(1, -1, width).split(ctx.chunk, 1) for tensor in (x, upstream))
        for part, above in zip(*parts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_(True)
                found = torch.autograd.grad(ctx.own(part), [part, *ctx.trained], above, allow_unused=True)
            to_x.append(found[0])
            for total, gradient in zip(sums, found[1:], strict=True):
                if gradient is not None:
                    total += gradient
        to_trained = (total.to(p.dtype) for total, p in zip(sums, ctx.trained, strict=True))
        return None, None, None, torch.cat(to_x, 1).view(x.shape), *to_trained
