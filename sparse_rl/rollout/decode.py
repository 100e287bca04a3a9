"""One decode step for all rows, without the host: feed the last token, sample the next one, record it.

A row runs while it is not done and has a free slot; a full row waits, unchanged, until an eviction frees slots. So the
host may run several steps before it syncs, and their number does not change what a sequence does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..attention import Feed, Given, giving
from ..cache import SlotCache, SlotFormat, Trace
from ..cache.ties import TieLog
from ..cache.trace import never, trace_dtype
from ..errors import SparseRLError
from ..kernels import ops
from ..kernels.twins_sample import Kept, RowSettings
from ..models import causal_lm_of, decoder_of, last_logits_only, taken_by
from ..models.routing import Routing, on_device
from .fold import Chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..attention.recurrent import FedStates


@dataclass
class RowState:
    """The state of every row, on the device. R rows, at most N new tokens and T tokens in all; `trace` and routes hold
    uint16 as int16 bits.
    """

    token: Tensor  # [R] the token that was sampled last and is fed next
    index: Tensor  # [R] its feed index
    used: Tensor  # [R] slots in use
    stream: Tensor  # [R] the sequence's random stream
    count: Tensor  # [R] tokens sampled
    done: Tensor  # [R] bool: idle, or finished and not yet collected
    tokens: Tensor  # [R, N]
    logprobs: Tensor  # [R, N] fp32
    trace: Tensor  # [R, L, H, T]
    limit: Tensor  # [R] most tokens that a row may sample, at most N
    capacity: Tensor  # [1] slots at which a row of this call is full, at most the cache's
    chunks: Chunks | None = None  # of rows that fold
    routes: Tensor | None = None  # [R, N, M, k] experts of sampled tokens that were fed, if recorded
    step_routes: Tensor | None = None  # [M, R, k] experts of the tokens that a step feeds
    kept: Kept | None = None  # the tokens that could be drawn, if recorded
    settings: RowSettings | None = None  # how each row samples, if rows differ
    slots: SlotFormat | None = None  # the cache's, for the traces
    ties: TieLog | None = None  # the cache's, likewise

    @classmethod
    def empty(
        cls,
        cache: SlotCache,
        tokens: int,
        new: int,
        folds: bool = False,
        routing: Routing | None = None,
        chooses: bool = False,
        room: int | None = None,
    ) -> RowState:
        """room: see `Sampling.room`"""
        rows, device = cache.rows, cache.device
        token, index, used, stream, count = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5))
        record = torch.zeros(rows, new, dtype=torch.int64, device=device)
        limit, capacity = torch.full_like(token, new), torch.tensor([cache.capacity], device=device)
        routes = step_routes = None
        if routing is not None:
            dtype, chosen = on_device(routing.dtype), routing.chosen
            routes = torch.zeros(rows, new, routing.layers, chosen, dtype=dtype, device=device)
            step_routes = torch.zeros(routing.layers, rows, chosen, dtype=dtype, device=device)
        return cls(
            token=token,
            index=index,
            used=used,
            stream=stream,
            count=count,
            done=torch.ones(rows, dtype=torch.bool, device=device),
            tokens=record,
            logprobs=record.float(),
            trace=empty_trace(cache, tokens),
            limit=limit,
            capacity=capacity,
            chunks=Chunks.empty(rows, new, device, chooses) if folds else None,
            routes=routes,
            step_routes=step_routes,
            kept=None if room is None else Kept.empty(rows, new, room, device),
            slots=cache.shape.slots,
            ties=cache.ties,
        )

    @property
    def never(self) -> int:
        """The value of `evicted_at` that means "never", in the bits of `trace`."""
        return never_in(self.trace)

    @property
    def by_row(self) -> list[Tensor]:
        others = ("capacity", "chunks", "kept", "settings", "slots", "step_routes", "ties")
        own = [getattr(self, name) for name in self.__dataclass_fields__ if name not in others]
        own += [tensor for part in (self.chunks, self.kept, self.settings) if part for tensor in part.tensors]
        return [tensor for tensor in own if tensor is not None]

    def has_room(self, room: int | None) -> bool:
        """Whether there is room to record the tokens that could be drawn (see `Sampling.room`)."""
        return room is None or (self.kept is not None and self.kept.ids.shape[-1] == room)

    def begin(self, new: int, capacity: int) -> None:
        """Begin a call: every row is idle."""
        self.limit.fill_(new)
        self.capacity.fill_(capacity)
        self.done.fill_(True)

    def live(self, width: int) -> Tensor:
        """Which of the first `width` rows take part in a step. bool [B]"""
        return ~self.done[:width] & (self.used[:width] < self.capacity)

    def live_and_full(self) -> Tensor:
        """Which rows would run if they had a free slot. bool [R]"""
        return ~self.done & (self.used >= self.capacity)

    def move(self, source: Tensor, to: Tensor) -> None:
        for tensor in self.by_row:
            tensor[to] = tensor[source]
        self.done[source] = True

    def start(self, rows: Tensor, used: Tensor, fed: Tensor, stream: Tensor) -> None:
        """Begin sequences whose prompts have been fed; their first tokens are recorded next. All arguments [N]"""
        self.used[rows], self.index[rows], self.stream[rows] = used, fed - 1, stream
        self.count[rows], self.done[rows] = 0, False
        self.trace[rows] = self.never
        if self.chunks is not None:
            self.chunks.start(rows)

    def record(
        self,
        rows: slice | Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        stop_ids: Tensor,
        live: Tensor,
        kept: Kept | None = None,
    ) -> None:
        """Record what running rows sampled. tokens, logprobs, live [B]; stop_ids [S] or [B, S]

        A log-prob that is not finite also ends the row, so that the host finds it as the row's last one.
        """
        place = self.count[rows].clamp(max=self.tokens.shape[1] - 1)
        which = torch.arange(len(self.count), device=tokens.device)[rows]
        for record, new in ((self.tokens, tokens), (self.logprobs, logprobs)):
            record[which, place] = torch.where(live, new, record[which, place])
        if kept is not None and self.kept is not None:
            for record, new in zip(self.kept.tensors, kept.tensors, strict=True):
                old = record[which, place]
                record[which, place] = torch.where(live.view(-1, *[1] * (old.dim() - 1)), new, old)
        self.token[rows] = torch.where(live, tokens, self.token[rows])
        self.count[rows] += live
        self.index[rows] += live
        ended = (tokens[:, None] == stop_ids).any(1) | (self.count[rows] >= self.limit[rows]) | ~logprobs.isfinite()
        self.done[rows] |= live & ended

    def record_routes(self, width: int, live: Tensor | None) -> None:
        """Record the experts of the tokens that were just fed to the first rows. live bool [B]"""
        if self.routes is None or self.step_routes is None:
            return
        rows = torch.arange(width, device=self.routes.device)
        place, new = (self.count[:width] - 1).clamp(min=0), self.step_routes[:, :width].transpose(0, 1)  # [B, M, k]
        if live is not None:
            new = torch.where(live[:, None, None], new, self.routes[rows, place])
        self.routes[rows, place] = new

    def traces_of(self, rows: list[int], tokens: list[int]) -> list[Trace]:
        """The trace of each trajectory, copied to the CPU because rows are reused. tokens: the length of each"""
        copied = [self.trace[row, :, :, :n] for row, n in zip(rows, tokens)]
        if len(rows) > 1:  # in one copy
            whole = self.trace[rows, :, :, : max(tokens)].cpu()
            copied = [trace[:, :, :n] for trace, n in zip(whole, tokens)]
        ties = self.ties_of(rows)
        return [as_trace(trace, self.slots, own) for trace, own in zip(copied, ties, strict=True)]

    def ties_of(self, rows: list[int]) -> list[Tensor | None]:
        """The ties of each row, int64 [N, 4]; None if they are not noted."""
        return [None if self.ties is None else self.ties.of_row(row) for row in rows]

    def routes_of(self, rows: list[int], prompts: list[Tensor | None], counts: list[int]) -> list[Tensor | None]:
        """The routes of each trajectory on the CPU, [T, M, k]; None if they are not recorded. prompts: their routes,
        [P, M, k]. The last token was never fed, so its experts are arbitrary.
        """
        if self.routes is None:
            return [None] * len(rows)
        copied, whole = self.routes[rows, : max(counts)].cpu(), []
        for prompt, response, n in zip(prompts, copied, counts, strict=True):
            assert prompt is not None
            routes = torch.cat([prompt.cpu(), response[:n]])
            routes[-1] = torch.arange(routes.shape[-1])
            whole.append(routes.view(torch.uint16) if routes.dtype == torch.int16 else routes)
        return whole


def empty_trace(cache: SlotCache, tokens: int) -> Tensor:
    """An uninitialised trace [R, L, H, T]; uint16 as int16 bits, because more operations support these."""
    dtype = torch.int32 if trace_dtype(tokens) == torch.int32 else torch.int16
    return torch.empty(cache.rows, cache.shape.layers, cache.shape.heads, tokens, dtype=dtype, device=cache.device)


def never_in(trace: Tensor) -> int:
    """The value of `evicted_at` that means "never", in the bits of a tensor from `empty_trace`."""
    return -1 if trace.dtype == torch.int16 else never(trace.dtype)


def as_trace(evicted_at: Tensor, slots: SlotFormat | None, ties: Tensor | None) -> Trace:
    """A trace with a copy of what a row has written: [L, H, T], uint16 as int16 bits, or int32; and of its ties"""
    dtype = trace_dtype(evicted_at.shape[-1])
    evicted_at = evicted_at.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if evicted_at.dtype == torch.int16:
        evicted_at = evicted_at.view(torch.uint16)
    elif dtype == torch.uint16:  # the call allowed for more tokens than this trajectory has
        evicted_at = evicted_at.clamp(max=never(dtype)).to(dtype)
    return Trace(evicted_at).with_slots(slots, ties)


def forward(model: nn.Module, tokens: Tensor, feed: Feed) -> Tensor:
    """Logits [B, V] after the last of the tokens being fed, tokens [B, T]; with `feed.ends`, after the last real token.

    On a CPU a matrix product rounds a row the same way for any number of rows from four on (with several threads: for
    multiples of four). Padding to such numbers makes a sequence independent, to the bit, of how many run beside it.
    """
    rows, length = tokens.shape
    padding = -rows % ops.rules(tokens.device).row_multiple if length < 4 else 0
    position = feed.index if feed.position is None else feed.position
    if padding:
        tokens, position = (torch.cat([x, x[:1].expand(padding, -1)]) for x in (tokens, position))
    states = _states(feed, padding)
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False, **states}
    if "position_ids" in taken_by(model):
        inputs["position_ids"] = position
    with giving(Given(position, feed=feed)):
        if feed.ends is None:
            logits = model(**inputs, **last_logits_only(model, tokens)).logits
        else:
            last = (feed.ends - 1 - feed.index[:, 0]).clamp(0, length - 1)
            logits = _logits_at(model, last, **inputs)
    missed = set(range(feed.cache.shape.layers)) - feed.layers_seen
    for fed in states.values():
        missed |= set(fed.end())
    if missed:
        images = set(getattr(causal_lm_of(model).config.get_text_config(), "cross_attention_layers", None) or ())
        why = "they attend to images" if missed <= images else "their code does not call it, or they are missing"
        raise SparseRLError(
            f"{type(model).__name__}: layers {sorted(missed)} did not use the replaced attention: {why}."
        )
    return logits[:rows, -1]


def _states(feed: Feed, padding: int) -> dict[str, FedStates]:
    """The states of recurrent layers in the form that the model takes; empty if it has none."""
    if feed.cache.states is None and not feed.cache.shape.latent:
        return {}
    from ..attention.recurrent import FedStates

    return {"past_key_values": FedStates(feed, padding)}


def _logits_at(model: nn.Module, place: Tensor, **inputs) -> Tensor:
    """Logits [B, 1, V] of one token per row, for which the head is computed only there. place [B]"""
    rows = torch.arange(len(place), device=place.device)
    head = cast("PreTrainedModel", model).get_output_embeddings()
    assert head is not None
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][rows, place][:, None], *args[1:]))
    try:
        return model(**inputs).logits
    finally:
        hook.remove()


def forward_modules(
    model: nn.Module,
    cache: SlotCache,
    state: RowState,
    token: Tensor,
    position: Tensor,
    live: Tensor | None,
    span: int,
) -> Tensor:
    """Logits after feeding a token to each of the first rows, by the model's own modules. token, position [B]

    This works for every supported architecture.
    """
    width = len(token)
    slot = state.used[:width].clamp(max=cache.capacity - 1)[:, None]
    feed = Feed(cache, slot, state.index[:width, None], span, position=position[:, None], live=live)
    return forward(model, token[:, None], feed)


def forward_and_states(
    model: nn.Module, cache: SlotCache, state: RowState, token: Tensor, position: Tensor, live: Tensor | None, span: int
) -> tuple[Tensor, Tensor]:
    """`forward_modules`, and the decoder's output [B, hidden] from which the logits were computed."""
    caught = []
    hook = decoder_of(model).register_forward_hook(lambda module, args, output: caught.append(output))
    try:
        logits = forward_modules(model, cache, state, token, position, live, span)
    finally:
        hook.remove()
    if not caught:
        raise SparseRLError(
            f"{type(model).__name__} does not run its decoder as a whole, so it cannot choose its folds; use beacon:N."
        )
    return logits, caught[0].last_hidden_state[: len(token), -1]
