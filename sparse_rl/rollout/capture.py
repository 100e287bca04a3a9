"""Running decode steps: one by one on the CPU, on a GPU by replaying one captured CUDA graph per row count.

A graph holds addresses. Everything it reads or writes lives as long as it does: cache and row state belong to the engine, weights are the
model's own and are updated in place, so an update needs no new capture. When something has changed, `addresses` differ.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ..beacon import beacon_of
from ..cache import SlotCache
from ..compressors import Compressor
from ..planning.memory import is_out_of_memory
from .decode import RowState, forward_modules, sample_next
from .fold import begin, fold
from .fused import FusedForward, changing_hooks
from .sampling import Sampling


class Decoder:
    """Advances the first rows of a cache by some tokens."""

    def __init__(
        self,
        model: nn.Module,
        cache: SlotCache,
        state: RowState,
        compressor: Compressor,
        sampling: Sampling,
        stop_ids: Tensor,
        waits: bool,
    ):
        """`waits`: several steps may run between two looks, so rows that are full must be left alone."""
        self.model, self.cache, self.state, self.sampling, self.stop_ids = model, cache, state, sampling, stop_ids
        self.compressor, self.beacon = compressor, beacon_of(model) if compressor.folds else None
        fused = fusing_pays(cache.keys.device) and FusedForward.fits(model, cache)
        self.waits = waits or fused or cache.keys.is_cuda or compressor.folds
        self.forward = (
            FusedForward(model, cache) if fused else None
        )  # before the addresses are read: weights may move once
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
        state = self.state
        live = state.live(width) if self.waits else None
        if self.beacon is None:
            logits = self.logits(state.token[:width], state.index[:width], live, span)
            sample_next(logits, state, self.sampling, self.stop_ids, live)
            return
        turn = begin(state, width, live, self.beacon, self.compressor)
        logits = self.logits(turn.token, turn.position, live, span)
        state.done[:width] |= turn.folding  # a beacon's output is not used: nothing is sampled from it
        sample_next(logits, state, self.sampling, self.stop_ids, live & ~turn.folding)
        state.done[:width] &= ~turn.folding
        fold(self.cache, state, turn)

    def logits(self, token: Tensor, position: Tensor, live: Tensor | None, span: int) -> Tensor:
        """After feeding one token to each of the first rows. token, position, live [B] -> [B, V]"""
        if self.forward is not None:
            return self.forward(self.state, token, position, live)
        return forward_modules(self.model, self.cache, self.state, token, position, live, span)

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
            warnings.warn(
                f"{type(self.model).__name__} cannot be captured in a CUDA graph ({why}); it runs, but slower.",
                stacklevel=2,
            )
            self.graphs = None
        finally:
            self.state.done.copy_(done)

    def record(self, width: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self.pool, capture_error_mode="thread_local"
        ):  # a learner may be at work in another thread
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
    found = [type(module), *changing_hooks(module), vars(module).get("forward")]
    for name, value in vars(module).items():
        items = (
            list(value.items())
            if isinstance(value, dict)
            else list(value)
            if isinstance(value, (list, tuple))
            else [value]
        )
        if name not in _OF_EVERY_MODULE and all(
            isinstance(x, _PLAIN) for item in items for x in (item if isinstance(item, tuple) else (item,))
        ):
            found.append((name, tuple(items)))
    return tuple(found)
