"""Put recorded routes into the order in which a micro-batch's tokens go through the model, and back
(models/routing.py).

Shapes: B rows, T tokens (padded), S tokens of a packed row, n = B * T or S tokens that the model reads, M layers with
experts, k experts of a token. Padding goes to the first experts, and its results are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..errors import SparseRLError
from ..models.routing import RouteRecorder, Routing, on_device, routing_of

Routes = tuple[Tensor | None, ...]  # [N]: the routes of each row, [t, M, k]; None: another process has them


def told_by(routes: Routes | None, rows: Tensor) -> list[Tensor] | None:
    """The routes of some rows, all of which this process has."""
    if routes is None:
        return None
    told = [route for row in rows.tolist() if (route := routes[row]) is not None]
    assert len(told) == len(rows), "these trajectories were sampled without routes"
    return told


class OldRoutes:
    """The routes of the pass that scores a step. In the shadow view it follows the sampler's; in the dense view its own
    are recorded within the `with`. Without a routing it does neither.
    """

    def __init__(
        self, model: nn.Module, routing: Routing | None, lengths: Tensor, sampler: Sequence[Tensor | None], view: str
    ):
        """lengths, sampler (its routes) [N]: of all rows"""
        self.model, self.lengths = model, lengths
        self.told = tuple(sampler) if routing is not None and view == "shadow" else None
        self.recorder = RouteRecorder(model, routing) if routing is not None and view == "dense" else None
        self._found = None if routing is None else list(sampler)

    @property
    def found(self) -> Routes | None:
        """The routes that the learner must follow."""
        return None if self._found is None else tuple(self._found)

    def __enter__(self) -> OldRoutes:
        if self.recorder is not None:
            self.recorder.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(*exception)

    def before(self, rows: Tensor, tokens: Tensor, seen: Replay | None) -> Tensor | None:
        """The experts to which a micro-batch is sent. tokens [B, T] of some rows -> [M, n, k]"""
        if self.recorder is not None:
            packing = None if seen is None else seen.packing
            count = tokens.numel() if packing is None else packing.size
            self.recorder.empty(count, next(self.model.parameters()).device)
        return sent_to(self.model, self.told, rows, self.lengths, seen)

    def after(self, rows: Tensor, seen: Replay | None) -> None:
        """Record to which experts a micro-batch went."""
        if self.recorder is not None and self._found is not None:
            for row, found in zip(rows.tolist(), recorded_by_row(self.recorder, self.lengths[rows], seen), strict=True):
                self._found[row] = found


def sent_to(
    model: nn.Module, routes: Routes | None, rows: Tensor, lengths: Tensor, seen: Replay | None
) -> Tensor | None:
    """The experts to which the tokens of some rows are sent, [M, n, k]; None: those that the model chooses.

    routes, lengths [N]: of all rows
    """
    told = told_by(routes, rows)
    return None if told is None else routes_in_order(model, told, lengths[rows], seen)


def routes_in_order(model: nn.Module, routes: Sequence[Tensor], lengths: Tensor, seen: Replay | None = None) -> Tensor:
    """The routes [t, M, k] of rows, after a check that they fit model and tokens, as [M, n, k] on the model's device.

    lengths [B]: of the rows, t each; seen: with the packing, if the rows are packed
    """
    routing = routing_of(model)
    if routing is None:
        raise SparseRLError("the trajectories hold routes, but this model has no experts; use the sampler's model.")
    device, counts = next(model.parameters()).device, lengths.tolist()
    for row, tokens in zip(routes, counts, strict=True):
        routing.check(row, tokens)
    padded = (
        torch.arange(routing.chosen).to(on_device(routing.dtype)).repeat(len(counts), max(counts), routing.layers, 1)
    )
    for whole, row, tokens in zip(padded, routes, counts, strict=True):
        whole[:tokens] = row.view(on_device(row.dtype))
    packing = None if seen is None else seen.packing
    if packing is None:
        return padded.flatten(0, 1).transpose(0, 1).to(device)
    there = torch.arange(max(counts)) < lengths[:, None]
    packed = padded.new_zeros(packing.size, routing.layers, routing.chosen)
    packed[packing.place.cpu()[there]] = padded[there]
    return packed.transpose(0, 1).to(device)


def recorded_by_row(recorder: RouteRecorder, lengths: Tensor, seen: Replay | None = None) -> list[Tensor]:
    """The inverse: the routes that a forward pass over rows recorded, [t, M, k] each, on the CPU."""
    assert recorder.into is not None
    found, counts = recorder.into.transpose(0, 1).cpu(), lengths.tolist()  # [n, M, k]
    packing = None if seen is None else seen.packing
    by_row = found.unflatten(0, (len(counts), -1)) if packing is None else found[packing.place.cpu()]
    return [row[:tokens].clone().view(recorder.routing.dtype) for row, tokens in zip(by_row, counts, strict=True)]


def common_start(routes: Sequence[Tensor] | None, row: int, other: int, tokens: int) -> int:
    """How many of the first `tokens` of two rows went through the same experts."""
    if routes is None:
        return tokens
    mine, theirs = (routes[r][:tokens].view(on_device(routes[r].dtype)) for r in (row, other))
    differ = (mine != theirs).flatten(1).any(1)
    return int(differ.long().argmax()) if differ.any() else tokens
