"""AdamW with masters and moments in host memory, which pass through the device of the weights bucket by bucket.

    host: master, moments  ->  device: AdamW; the parameter becomes the master's rounding  ->  host: master, moments

AdamW treats every number separately, so the result has the bits of an undivided update. With a GPU, host memory is
pinned and two streams take turns: while one bucket is updated, another is copied. An optimizer step copies 12 bytes per
trained parameter in and 12 out; 8 and 8 for fp32 parameters, which are their own masters on the device. On a CPU the
copies are made as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BUCKET = 2**25  # parameters in a bucket
LANES = 2  # buckets on the device at a time


@dataclass(frozen=True)
class Piece:
    """Some rows of a trained tensor; all tensors here have the same shape."""

    master: Tensor  # fp32, on the host; on the device if it is the parameter itself
    exp_avg: Tensor  # fp32, on the host
    exp_avg_sq: Tensor  # fp32, on the host
    gradient: Tensor  # fp32, on the device
    rounded: Tensor | None  # the parameter, on the device; None: the master is the parameter
    steps: float  # optimizer steps before this one

    def rows(self, start: int, end: int) -> Piece:
        cut = {name: value[start:end] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Piece(**{**vars(self), **cut})


def host_zeros(shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
    """fp32 zeros in host memory, pinned if the device is a GPU.

    They are parts of one block, because pinned blocks are rounded up to powers of two.
    """
    sizes = [math.prod(shape) for shape in shapes]
    block = torch.zeros(sum(sizes), pin_memory=device.type == "cuda")
    return [part.view(shape) for part, shape in zip(block.split(sizes), shapes, strict=True)]


@torch.no_grad()
def update_by_buckets(pieces: Iterable[Piece], group: dict[str, Any], device: torch.device, size: int = BUCKET) -> None:
    """One AdamW step of some tensors. group: a parameter group of torch's AdamW, for its rates"""
    streams = [torch.cuda.Stream(device) for _ in range(LANES)] if device.type == "cuda" else []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    for number, bucket in enumerate(buckets(pieces, size)):
        with torch.cuda.stream(streams[number % LANES]) if streams else nullcontext():
            _update(bucket, group, device)
    for stream in streams:
        stream.synchronize()  # from here on the host may read the results


def buckets(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Group pieces into buckets of at most `size` numbers, in the given order; larger tensors are cut between rows."""
    bucket, room = [], size
    for whole in pieces:
        rows = len(whole.master) if whole.master.dim() else 1
        a_row, start = max(1, whole.master.numel() // max(rows, 1)), 0
        while start < rows:
            if bucket and room < min(a_row * (rows - start), size):  # neither the rest nor a whole bucket of it fits
                yield bucket
                bucket, room = [], size
            end = min(rows, start + max(1, room // a_row))
            bucket.append(whole.rows(start, end) if end - start < rows else whole)
            room -= a_row * (end - start)
            start = end
    if bucket:
        yield bucket


def _update(bucket: list[Piece], group: dict[str, Any], device: torch.device) -> None:
    def here(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True, copy=True)

    masters = [piece.master if piece.rounded is None else here(piece.master) for piece in bucket]
    exp_avgs, exp_avg_sqs = [here(piece.exp_avg) for piece in bucket], [here(piece.exp_avg_sq) for piece in bucket]
    steps = [torch.tensor(piece.steps, device=device) for piece in bucket]
    beta1, beta2 = group["betas"]
    adamw(
        masters, [piece.gradient for piece in bucket], exp_avgs, exp_avg_sqs, [], steps, fused=device.type == "cuda",
        amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
        eps=group["eps"],
    )  # fmt: skip
    for piece, master, exp_avg, exp_avg_sq in zip(bucket, masters, exp_avgs, exp_avg_sqs, strict=True):
        if piece.rounded is not None:
            piece.rounded.copy_(master)
            piece.master.copy_(master, non_blocking=True)
        piece.exp_avg.copy_(exp_avg, non_blocking=True)
        piece.exp_avg_sq.copy_(exp_avg_sq, non_blocking=True)
