"""Running decode steps: one by one on the CPU, on a GPU by replaying one captured CUDA graph per row count.

A graph holds addresses. Everything it reads or writes lives as long as it does: cache and row state belong to the engine, weights are the
model's own and are updated in place, so an update needs no new capture. When something has changed, `addresses` differ.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ..cache import SlotCache
from ..plan import is_out_of_memory
from .decode import RowState, forward_modules, sample_next
from .fused import FusedForward, changing_hooks
from .sampling import Sampling


class Decoder:
    """Advances the first rows of a cache by some tokens."""

    def __init__(self, model: nn.Module, cache: SlotCache, state: RowState, sampling: Sampling, stop_ids: Tensor, waits: bool):
        """`waits`: several steps may run between two looks, so rows that are full must be left alone."""
        self.model, self.cache, self.state, self.sampling, self.stop_ids = model, cache, state, sampling, stop_ids
        fused = fusing_pays(cache.keys.device) and FusedForward.fits(model, cache)
        self.waits = waits or fused or cache.keys.is_cuda
        self.forward = FusedForward(model, cache) if fused else None  # before the addresses are read: weights may move once
        self.graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if cache.keys.is_cuda else None
        self.pool = torch.cuda.graph_pool_handle() if cache.keys.is_cuda else None
        self.addresses = addresses(model)

    def run(self, width: int, steps: int, span: int) -> None:
        """`steps` tokens for each of the first `width` rows that runs. span: slots to read, where a kernel does not know it itself."""
        if self.graphs is None:
            for _ in range(steps):
                self.step(width, span)
            return
        if width not in self.graphs:
            self.capture(width)
            return self.run(width, steps, span)  # if it could be captured
        for _ in range(steps):
            self.graphs[width].replay()

    def step(self, width: int, span: int) -> None:
        live = self.state.live(width) if self.waits else None
        if self.forward is not None:
            logits = self.forward(self.state, width, live)
        else:
            logits = forward_modules(self.model, self.cache, self.state, width, live, span)
        sample_next(logits, self.state, self.sampling, self.stop_ids, live)

    def capture(self, width: int) -> None:
        """Record one step. While it is tried out every row is done, so it changes nothing."""
        done = self.state.done.clone()
        self.state.done.fill_(True)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels, lets cuBLAS choose
                    self.step(width, self.cache.capacity)
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[width] = self.record(width)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = str(error).splitlines()[0]
            warnings.warn(f"{type(self.model).__name__} cannot be captured in a CUDA graph ({why}); it runs, but slower.", stacklevel=2)
            self.graphs = None
        finally:
            self.state.done.copy_(done)

    def record(self, width: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(width, self.cache.capacity)
        return graph


def fusing_pays(device: torch.device) -> bool:
    return device.type == "cuda"


def addresses(model: nn.Module) -> tuple:
    """What a captured graph took for granted: where tensors lie, every module's plain settings (adapters, scales), hooks."""
    tensors = tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
    settings = tuple(_settings(module) for module in model.modules())
    return tensors, settings


_PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = vars(nn.Module()).keys()  # training, and what torch keeps for itself


def _settings(module: nn.Module) -> tuple:
    found = [*changing_hooks(module), vars(module).get("forward")]
    for name, value in vars(module).items():
        items = list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else [value]
        if name not in _OF_EVERY_MODULE and all(
            isinstance(x, _PLAIN) for item in items for x in (item if isinstance(item, tuple) else (item,))
        ):
            found.append((name, tuple(items)))
    return tuple(found)
