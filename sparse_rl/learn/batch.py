"""From trajectories to what an optimizer step needs: padded tensors, old log-probs, weights, micro-batches.

    collate -> Sampled      what the engine recorded
    score   -> Scored       + what the learner thinks of it before the update (old), and the reference
    make_batches   -> [Batch]      + advantages, corrections and the scale of every token, one batch per optimizer step
    pack    -> [rows]       which rows go through the model together

Shapes: N trajectories, T tokens (prompt + response, padded at the end). Log-probs at t are those of token t. All on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..cache import Trace
from ..errors import SparseRLError
from ..models import evaluating
from ..records import Trajectory
from .correct import Corrected, Correction, correct
from .loss import Loss, token_scale
from .score import batch_logprobs, hidden_states, logprobs_entropies_ranks, over_chunks, replay_of

_ROUNDING = {
    torch.bfloat16: 0.1,
    torch.float16: 0.1,
    torch.float32: 0.02,
}  # mean nats between two kernels: ten times what is seen


@dataclass(frozen=True)
class Sampled:
    tokens: Tensor  # int64 [N, T]; 0 beyond a trajectory's end
    lengths: Tensor  # int64 [N]: prompt + response
    mask: Tensor  # bool [N, T]: response tokens
    sampler_logprobs: Tensor  # fp32 [N, T]; 0 off the mask
    owner: Tensor  # int64 [N]: the process that sampled each, and so has its whole trace
    traces: tuple[Trace, ...]  # [N]: what each query could see


@dataclass(frozen=True)
class Scored:
    sampled: Sampled
    old_logprobs: Tensor  # fp32 [N, T]: the learner's view before the update
    entropies: Tensor  # fp32 [N, T]: of the old distributions
    ranks: Tensor  # fp32 [N, T]: of the tokens in them, 1 for the likeliest; 0 off the mask
    reference_logprobs: Tensor | None = None  # fp32 [N, T], when a KL term is on
    view: str = "dense"  # in which they were computed, and in which the learner must see the trajectories

    @property
    def gap(self) -> Tensor:
        """What compression changed: old - sampler log-prob, 0 off the mask. fp32 [N, T]"""
        return self.old_logprobs - self.sampled.sampler_logprobs

    def rows(self, index: Tensor) -> Scored:
        traces = tuple(self.sampled.traces[i] for i in index.tolist())
        return replace(_rows(self, index), sampled=replace(_rows(self.sampled, index), traces=traces))


@dataclass(frozen=True)
class Batch:
    """One optimizer step."""

    tokens: Tensor  # int64 [N, T]
    lengths: Tensor  # int64 [N]
    mask: Tensor  # bool [N, T]: M, the tokens that count
    old_logprobs: Tensor  # fp32 [N, T]: what the ratio is centred on
    reference_logprobs: Tensor | None
    advantages: Tensor  # fp32 [N]
    weights: Tensor  # fp32 [N, T]: w
    scale: Tensor  # fp32 [N, T]: so that the sum over tokens is the chosen mean
    response_tokens: int  # before any correction
    clipped: Tensor  # bool [N, T]: the learner marks the tokens whose gain it clipped
    owner: Tensor  # int64 [N]: the process that learns from each
    traces: tuple[Trace, ...] | None = None  # [N]: the learner sees the trajectories under them; None: dense


def collate(trajectories: Sequence[Trajectory]) -> Sampled:
    lengths = torch.tensor([len(t.tokens) for t in trajectories])
    shape = (len(trajectories), int(lengths.max()))
    tokens, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float32)
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, t in enumerate(trajectories):
        mask[i, : len(t.tokens)] = t.response_mask
        tokens[i, : len(t.tokens)] = t.tokens
        logprobs[i, : len(t.tokens)] = t.sampler_logprobs
    owner = torch.zeros(len(trajectories), dtype=torch.int64)
    return Sampled(tokens, lengths, mask, torch.where(mask, logprobs, 0.0), owner, tuple(t.trace for t in trajectories))


def join(*parts: Scored) -> Scored:
    """All of them, one after the other, padded to the longest."""
    width = max(part.sampled.tokens.shape[1] for part in parts)

    def every(name: str, records: Sequence) -> Tensor | None:
        tensors = [getattr(record, name) for record in records]
        if tensors[0] is None or tensors[0].dim() == 1:
            return None if tensors[0] is None else torch.cat(tensors)
        return torch.cat([nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    sampled = [part.sampled for part in parts]
    tensors = {name: every(name, sampled) for name in Sampled.__dataclass_fields__ if name != "traces"}
    whole = Sampled(**tensors, traces=tuple(trace for s in sampled for trace in s.traces))
    rest = {name: every(name, parts) for name in ("old_logprobs", "entropies", "ranks", "reference_logprobs")}
    return Scored(whole, **rest, view=parts[0].view)


@torch.no_grad()
def score(
    model: nn.Module,
    sampled: Sampled,
    micro_batch_tokens: int,
    temperature: float = 1.0,
    reference: AbstractContextManager | None = None,
    view: str = "dense",
) -> Scored:
    """Teacher-forced old log-probs in a view. `reference`: a context whose value is the reference model, seen in the same view."""
    device = next(model.parameters()).device
    old, entropies, ranks = (torch.zeros_like(sampled.sampler_logprobs) for _ in range(3))
    micro_batches = pack(sampled.lengths, micro_batch_tokens)
    with evaluating(model):
        for rows in micro_batches:
            tokens, asked = _cut(sampled, rows)
            states = hidden_states(model, tokens.to(device), replay(model, sampled, rows) if view == "shadow" else None)
            values = over_chunks(
                model, states, asked.to(device), logprobs_entropies_ranks(temperature), tokens[asked].to(device)
            ).cpu()
            for whole, part in zip((old, entropies, ranks), values.unbind(-1)):
                whole[rows, : tokens.shape[1]] = torch.zeros(tokens.shape).masked_scatter(asked, part)
    if view == "shadow":
        check_replay(old - sampled.sampler_logprobs, sampled.mask, next(model.parameters()).dtype)
    if reference is None:
        return Scored(sampled, old, entropies, ranks, view=view)
    references = torch.zeros_like(old)
    with reference as other, evaluating(other):
        for rows in micro_batches:
            tokens, asked = _cut(sampled, rows)
            seen = replay(model, sampled, rows) if view == "shadow" else None
            references[rows, : tokens.shape[1]] = batch_logprobs(
                other, tokens.to(device), asked.to(device), temperature, seen
            ).cpu()
    return Scored(sampled, old, entropies, ranks, references, view)


def check_replay(gap: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
    """Refuse traces that are not those of their tokens: under its own trace a trajectory has the sampler's log-probs, up to rounding."""
    rounding, tokens = _ROUNDING.get(dtype, _ROUNDING[torch.float32]), mask.sum(1)
    off = (gap.abs() * mask).sum(1)  # nats, per trajectory; a few tokens may be off by more than many are on average
    bad = ~(off <= rounding * tokens.clamp(min=64))
    if not off.sum() <= rounding * tokens.sum().clamp(min=64):  # many short ones, each of them off by little
        bad |= off > rounding * tokens
    if bad.any():
        raise SparseRLError(
            f"in the shadow view the learner's log-probs of {int(bad.sum())} of {len(bad)} trajectories are up to "
            f"{(off / tokens.clamp(min=1))[bad].max().item():.3g} nats off the sampler's on average, where rounding in "
            f"{str(dtype).removeprefix('torch.')} explains {rounding}: the traces are not those of these tokens, or other weights or "
            "another temperature sampled them; sample the trajectories again."
        )


def ratio_baseline(scored: Scored, how: Correction) -> Tensor:
    """What a correction takes for old: the recomputed log-probs, or (naive) the sampler's own, so that its gap is 0. fp32 [N, T]"""
    return scored.sampled.sampler_logprobs if how.old == "sampler" else scored.old_logprobs


def apply_correction(scored: Scored, how: Correction) -> Corrected:
    return correct(ratio_baseline(scored, how) - scored.sampled.sampler_logprobs, scored.sampled.mask, how)


def make_batches(scored: Scored, advantages: Tensor, how: Correction, loss: Loss, minibatches: int) -> list[Batch]:
    """One batch per optimizer step, trajectories in the order given. advantages [N]"""
    batches = []
    for rows in torch.arange(len(advantages)).tensor_split(minibatches):
        part = scored.rows(rows)
        sampled, fixed = part.sampled, apply_correction(part, how)
        batches.append(
            Batch(
                tokens=sampled.tokens,
                lengths=sampled.lengths,
                mask=fixed.mask,
                old_logprobs=ratio_baseline(part, how),
                reference_logprobs=part.reference_logprobs,
                advantages=advantages[rows].float(),
                weights=fixed.weights,
                scale=token_scale(fixed.mask, fixed.accepted, loss),
                response_tokens=int(sampled.mask.sum()),
                clipped=torch.zeros_like(sampled.mask),
                owner=sampled.owner,
                traces=sampled.traces if scored.view == "shadow" else None,
            )
        )
    return batches


def replay(model: nn.Module, record: Sampled | Batch, rows: Tensor) -> Replay:
    """What the queries of some rows could see."""
    return replay_of(model, [(record.tokens[i, : record.lengths[i]], record.traces[i]) for i in rows.tolist()])


def pack(lengths: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """Rows [N] in micro-batches of at most `micro_batch_tokens` tokens, padding included, longest first; a longer row goes alone."""
    order = lengths.argsort(descending=True, stable=True)
    packed, start = [], 0
    while start < len(order):
        count = max(1, micro_batch_tokens // int(lengths[order[start]]))
        packed.append(order[start : start + count])
        start += count
    return packed


def _cut(sampled: Sampled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and response mask of some rows, without the padding they do not need."""
    width = int(sampled.lengths[rows].max())
    return sampled.tokens[rows, :width], sampled.mask[rows, :width]


def _rows(record, index: Tensor):
    """Some rows of every tensor of a record."""
    return replace(record, **{name: value[index] for name, value in vars(record).items() if isinstance(value, Tensor)})
