"""Run decode steps: one by one on a CPU; on a GPU by replaying a captured CUDA graph for each row count.

A graph holds addresses, so everything that it reads or writes must live as long as the graph: cache and row state
belong to the engine, and weights are the model's own, updated in place, so an update needs no new capture. If something
was moved or changed, `addresses` differ and the step is captured again.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import SlotCache
from ..compressors import Compressor
from ..kernels import ops
from ..models.routing import RouteRecorder
from ..planning.memory import is_out_of_memory
from .decode import RowState, forward_and_states, forward_modules
from .experts import computing_experts, experts_to_switch, implementation_of
from .fold import Folding
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
        sampling: Sampling | None,
        stop_ids: Tensor,
        waits: bool,
        recorder: RouteRecorder | None = None,
    ):
        """`sampling`: settings of all rows; None: every row has its own, stop ids included (`RowState.settings`).
        `waits`: full or idle rows must stay unchanged, because several steps run between two syncs or idle rows are
        held.
        `recorder`: records the experts that tokens go through.
        """
        self.recorder = recorder
        self.model, self.cache, self.state, self.sampling, self.stop_ids = model, cache, state, sampling, stop_ids
        self.folding = Folding(model, cache, state, compressor) if compressor.folds else None
        rules = ops.rules(cache.device)
        fused = rules.fuses and FusedForward.fits(model, cache)
        self.waits = waits or fused or rules.captures or compressor.folds
        self.forward = FusedForward(model, cache) if fused else None  # moves weights, so it must precede `addresses`
        self.graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if rules.captures else None
        self.pool = torch.cuda.graph_pool_handle() if rules.captures else None
        self.experts = experts_to_switch(model)
        self.addresses = addresses(model)

    def run(self, width: int, steps: int, span: int) -> None:
        """Do `steps` steps for those of the first `width` rows that run. span: slots to read, for
        kernels that need it
        """
        if self.graphs is None:
            for _ in range(steps):
                self.step(width, span)
            return
        if width not in self.graphs:
            self.capture(width)
            return self.run(width, steps, span)  # one by one, if the step could not be captured
        for _ in range(steps):
            self.graphs[width].replay()

    def step(self, width: int, span: int) -> None:
        """Feed a token to each running row among the first `width`, and sample the next one."""
        with computing_experts(self.experts):
            self._step(width, span)

    def _step(self, width: int, span: int) -> None:
        state = self.state
        live = state.live(width) if self.waits else None

        def forward(token: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
            assert self.folding is not None
            if self.folding.compressor.chooses:
                return self.logits_and_states(token, position, live, span)
            return self.logits(token, position, live, span), None

        if self.folding is None:
            self.sample(self.logits(state.token[:width], state.index[:width], live, span))
        else:
            assert live is not None
            self.folding.step(width, live, forward, self.sample)

    def logits(self, token: Tensor, position: Tensor, live: Tensor | None, span: int) -> Tensor:
        """Logits after feeding one token to each of the first rows. token, position, live [B] -> [B, V]"""
        state, width = self.state, len(token)
        if self.recorder is not None and state.step_routes is not None:
            self.recorder.into = state.step_routes[:, :width]
        if self.forward is None:
            logits = forward_modules(self.model, self.cache, state, token, position, live, span)
        else:
            assert live is not None
            logits = self.forward(state, token, position, live)
        state.record_routes(width, live)
        return logits

    def logits_and_states(
        self, token: Tensor, position: Tensor, live: Tensor | None, span: int
    ) -> tuple[Tensor, Tensor]:
        """`logits`, and the hidden states from which the head computed them. -> [B, V], [B, hidden]"""
        if self.forward is None:
            return forward_and_states(self.model, self.cache, self.state, token, position, live, span)
        assert live is not None
        states = self.forward.states(self.state, token, position, live)
        return self.forward.head(states), states

    def sample(self, logits: Tensor) -> None:
        """Sample a token for every running row and record it. logits [B, V]"""
        sampling = self.sampling
        if sampling is None:
            return ops.sample_by_row(logits, self.state)
        records = sampling.records is not None
        limits = (sampling.top_k, sampling.top_p)
        ops.sample_and_record(logits, self.state, sampling.temperature, self.stop_ids, *limits, records)

    def capture(self, width: int) -> None:
        """Capture one step. Meanwhile every row counts as done, so the trial runs change nothing."""
        done = self.state.done.clone()
        self.state.done.fill_(True)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels and lets cuBLAS choose its own
                    self.step(width, self.cache.capacity)
            torch.cuda.current_stream().wait_stream(stream)
            assert self.graphs is not None
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
        # thread_local: a learner may be working in another thread
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.step(width, self.cache.capacity)
        return graph


def addresses(model: nn.Module) -> tuple:
    """What a captured graph depends on: the addresses of tensors, and the plain settings and hooks of every module.

    The settings include adapters and scales.
    """
    tensors = tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
    settings = tuple(_settings(module) for module in model.modules())
    return tensors, settings


_PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = vars(nn.Module()).keys()  # training, and what torch keeps for itself


def _settings(module: nn.Module) -> tuple:
    found = [type(module), *changing_hooks(module), vars(module).get("forward"), implementation_of(module)]
    for name, value in vars(module).items():
        items = _items(value)
        parts = [x for item in items for x in (item if isinstance(item, tuple) else (item,))]
        if name not in _OF_EVERY_MODULE and all(isinstance(x, _PLAIN) for x in parts):
            found.append((name, tuple(items)))
    return tuple(found)


def _items(value: Any) -> list:
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, (list, tuple)) else [value]
