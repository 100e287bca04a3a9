"""Turn trajectories into what an optimizer step needs: padded tensors, old log-probs, weights, micro-batches.

    collate           -> Sampled      what the engine recorded
    score             -> Scored       + the learner's log-probs before the update (old), and the reference's
    apply_correction  -> Corrected    the tokens that count, their weights, the accepted trajectories (correct.py)
    make_batches      -> [Batch]      + advantages and the scale of every token, one batch per optimizer step
    micro_batches_of  -> [rows]       which rows go through the model together (packing.py)

Shapes: N trajectories, T tokens (prompt + response, padded at the end). Log-probs at t are those of token t. Everything
is on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..cache import Support, Trace
from ..kernels.modules import fused
from ..models import evaluating
from ..models.routing import Routing
from ..records import Trajectory
from .check_replay import check_replay
from .correct import Corrected, Correction, accept, correct_rows, normalise_weights
from .dpo import Pairs
from .find_support import needs_search, score_and_find
from .long import long_rows
from .loss import Loss, token_scale
from .packing import micro_batches_of, packed_replay
from .routes import OldRoutes, Routes, told_by
from .score import batch_logprobs, hidden_states, replay_of, score_of
from .support import check_recorded, ids_for

if TYPE_CHECKING:
    from .critic import Critic


@dataclass(frozen=True)
class Sampled:
    tokens: Tensor  # int64 [N, T]; 0 beyond a trajectory's end
    lengths: Tensor  # int64 [N]: prompt + response
    mask: Tensor  # bool [N, T]: response tokens, and beacons that the policy chose
    sampler_logprobs: Tensor  # fp32 [N, T]; 0 off the mask
    owner_rank: Tensor  # int64 [N]: the process that sampled each trajectory and has its whole trace
    traces: tuple[Trace, ...]  # [N]: what each query could see
    choices: Tensor | None = None  # bool [N, T]: tokens whose log-prob includes a choice about folding (score.py)
    supports: tuple[Support | None, ...] | None = None  # [N]: what could be drawn; None: all tokens could be


@dataclass(frozen=True)
class Scored:
    sampled: Sampled
    old_logprobs: Tensor  # fp32 [N, T]: the learner's, in its view, before the update
    entropies: Tensor  # fp32 [N, T]: of the old distributions
    ranks: Tensor  # fp32 [N, T]: of the tokens in the old distributions, 1 for the likeliest; 0 off the mask
    reference_logprobs: Tensor | None = None  # fp32 [N, T], if there is a KL term
    values: Tensor | None = None  # fp32 [N, T]: a critic's, of the states before the tokens; 0 off the mask
    view: str = "dense"  # the view in which the log-probs were computed, and in which the learner must learn
    # bool [N]: the rows that went through the model, which metrics cover; None: all did. In the shadow view the others
    # need not, because the sampler's log-probs are the learner's up to rounding and serve as old ones.
    seen: Tensor | None = None
    # The experts to which the learner sends tokens: the sampler's in the shadow view, the old pass's in the dense one.
    # None: it chooses again.
    routes: Routes | None = None

    @property
    def gap(self) -> Tensor:
        """What compression changed: old - sampler log-prob, 0 off the mask. fp32 [N, T]"""
        return self.old_logprobs - self.sampled.sampler_logprobs

    def with_seen(self, rows: Tensor, logprobs: Tensor, entropies: Tensor) -> Scored:
        """Add the log-probs and entropies of some more rows, which then count as seen. int64 [n], fp32 [n, T] each"""
        assert self.seen is not None
        width = logprobs.shape[1]
        old, spread, seen = self.old_logprobs.clone(), self.entropies.clone(), self.seen.clone()
        old[rows, :width], spread[rows, :width], seen[rows] = logprobs, entropies, True
        return replace(self, old_logprobs=old, entropies=spread, seen=seen)

    def with_shown(self, other: Scored) -> Scored:
        """Add the log-probs, entropies and ranks of rows that only another pass scored; they do not count as seen."""
        assert self.seen is not None and other.seen is not None
        taken = (other.seen & ~self.seen)[:, None]
        names = ("old_logprobs", "entropies", "ranks")
        return replace(self, **{n: torch.where(taken, getattr(other, n), getattr(self, n)) for n in names})

    def rows(self, index: Tensor) -> Scored:
        def chosen(values):
            return None if values is None else tuple(values[i] for i in index.tolist())

        own = self.sampled
        sampled = replace(_rows(own, index), traces=chosen(own.traces), supports=chosen(own.supports))
        return replace(_rows(self, index), sampled=sampled, routes=chosen(self.routes))


@dataclass(frozen=True)
class Batch:
    """Everything that one optimizer step needs."""

    tokens: Tensor  # int64 [N, T]
    lengths: Tensor  # int64 [N]
    mask: Tensor  # bool [N, T]: M, the tokens that count
    old_logprobs: Tensor  # fp32 [N, T]: the denominator of the ratio
    reference_logprobs: Tensor | None
    advantages: Tensor  # fp32 [N], or [N, T] if every token has its own
    weights: Tensor  # fp32 [N, T]: w
    scale: Tensor  # fp32 [N, T]: factors that turn the sum over tokens into the chosen mean
    response_tokens: int  # before any correction
    owner_rank: Tensor  # int64 [N]: the process that learns from each trajectory
    traces: tuple[Trace, ...] | None = None  # [N]: the learner sees the trajectories under them; None: dense
    supports: tuple[Support | None, ...] | None = None  # [N]: tokens over which log-probs are renormalised
    clip_kl: float | None = None  # the correction's bound of the KL estimate
    pairs: Pairs | None = None  # the pairs of an algorithm that compares rows
    row_factors: Tensor | None = None  # fp64 [N]: derivatives of its loss by the sums of the rows' log-probs
    old_values: Tensor | None = None  # fp32 [N, T]: a critic's, before the update
    returns: Tensor | None = None  # fp32 [N, T]: the targets of the critic
    routes: Routes | None = None  # the experts to which tokens are sent; None: the learner chooses again
    choices: Tensor | None = None  # bool [N, T]: as in Sampled

    @property
    def row_advantages(self) -> Tensor:
        """fp32 [N]: each row's advantage, or the mean over those of its tokens that count."""
        if self.advantages.dim() == 1:
            return self.advantages
        return (self.advantages * self.mask).sum(1) / self.mask.sum(1).clamp(min=1)

    def part(self, rows: Tensor, device: torch.device) -> Batch:
        """Some rows on a device, without unneeded padding. Traces, routes, supports and pairs are not cut."""
        width = int(self.lengths[rows].max())

        def cut(tensor: Tensor) -> Tensor:
            return (tensor[rows] if tensor.dim() == 1 else tensor[rows, :width]).to(device)

        tensors = {name: cut(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, traces=None, routes=None, supports=None, pairs=None, **tensors)


def collate(trajectories: Sequence[Trajectory], rank: int = 0) -> Sampled:
    """Put trajectories into padded tensors. `rank`: the process that sampled them"""
    lengths = torch.tensor([len(t.tokens) for t in trajectories])
    shape = (len(trajectories), int(lengths.max()))
    tokens, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float32)
    mask, choices = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for i, t in enumerate(trajectories):
        mask[i, : len(t.tokens)] = t.action_mask
        if t.choices is not None:
            choices[i, : len(t.tokens)] = t.choices
        tokens[i, : len(t.tokens)] = t.tokens
        logprobs[i, : len(t.tokens)] = t.sampler_logprobs
    owner_rank, traces = torch.full_like(lengths, rank), tuple(t.trace for t in trajectories)
    supports = tuple(t.support for t in trajectories) if any(t.support is not None for t in trajectories) else None
    chosen = choices if any(t.choices is not None for t in trajectories) else None
    return Sampled(tokens, lengths, mask, torch.where(mask, logprobs, 0.0), owner_rank, traces, chosen, supports)


def join(*parts: Scored) -> Scored:
    """The rows of all parts, one part after the other, padded to the longest."""
    width = max(part.sampled.tokens.shape[1] for part in parts)

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    sampled = [part.sampled for part in parts]
    references = [part.reference_logprobs for part in parts if part.reference_logprobs is not None]
    values = [part.values for part in parts if part.values is not None]
    routes = [part.routes for part in parts if part.routes is not None]
    choices = [s.choices for s in sampled if s.choices is not None]
    assert all(len(found) in (0, len(parts)) for found in (references, values, routes, choices))
    return Scored(
        Sampled(
            tokens=padded([s.tokens for s in sampled]),
            lengths=torch.cat([s.lengths for s in sampled]),
            mask=padded([s.mask for s in sampled]),
            sampler_logprobs=padded([s.sampler_logprobs for s in sampled]),
            owner_rank=torch.cat([s.owner_rank for s in sampled]),
            traces=tuple(trace for s in sampled for trace in s.traces),
            choices=padded(choices) if choices else None,
            supports=None if sampled[0].supports is None else tuple(x for s in sampled for x in s.supports or ()),
        ),
        old_logprobs=padded([part.old_logprobs for part in parts]),
        entropies=padded([part.entropies for part in parts]),
        ranks=padded([part.ranks for part in parts]),
        reference_logprobs=padded(references) if references else None,
        values=padded(values) if values else None,
        view=parts[0].view,
        seen=None if parts[0].seen is None else torch.cat([part.seen for part in parts if part.seen is not None]),
        routes=tuple(row for part in routes for row in part) if routes else None,
    )


@torch.no_grad()
def score(
    model: nn.Module,
    sampled: Sampled,
    micro_batch_tokens: int,
    temperature: float = 1.0,
    reference: AbstractContextManager[nn.Module] | None = None,
    view: str = "dense",
    reference_view: str | None = None,
    packing: bool = False,
    critic: Critic | None = None,
    only: Tensor | None = None,
    routing: Routing | None = None,
) -> Scored:
    """Teacher-forced old log-probs in a view, and a critic's values from the same pass.

    `reference`: a context manager that gives the reference model, which sees the trajectories in the same view or in
    its own. `packing`: micro-batches are packed rows (packing.py). `only` int64 [n]: in the shadow view, the rows to
    score; the others keep the sampler's log-probs. `routing`: given if the model's routes are replayed: in the dense
    view this pass records them; in the shadow view it follows the sampler's, which the traces hold. The reference
    chooses its own.

    If the sampler recorded only margins of what it could draw, the supports are found here, once for the whole step.
    """
    assert only is None or view == "shadow", "in the dense view the sampler's log-probs are others"
    assert only is None or sampled.supports is None, "supports are found by scoring"
    supports = list(sampled.supports or ())
    check_recorded(supports, view)
    device = next(model.parameters()).device
    old, entropies, ranks = (torch.zeros_like(sampled.sampler_logprobs) for _ in range(3))
    values = None if critic is None else torch.zeros_like(old)
    micro_batches = to_score = micro_batches_of(model, sampled.tokens, sampled.lengths, micro_batch_tokens, packing)
    marked = None  # the rows that go through the model, if some do not
    if only is not None:
        old, marked = sampled.sampler_logprobs.clone(), torch.zeros_like(sampled.lengths, dtype=torch.bool)
        marked[only] = True
        parts = micro_batches_of(model, sampled.tokens[only], sampled.lengths[only], micro_batch_tokens, packing)
        to_score = [only[part] for part in parts]
    routes = OldRoutes(model, routing, sampled.lengths, [trace.routes for trace in sampled.traces], view)
    of_critic = nullcontext() if critic is None else evaluating(critic)
    with evaluating(model), of_critic, fused(model, critic), long_rows(model, critic), routes:
        for rows in to_score:
            tokens, response, choices = _cut(sampled, rows, device)
            seen = seen_by(model, sampled, rows, view == "shadow", packing, routes.told)
            states = hidden_states(model, tokens.to(device), seen, routes.before(rows, tokens, seen))
            routes.after(rows, seen)
            targets = (model, states, tokens.to(device), response.to(device), temperature)
            if needs_search(supports, rows):
                found = score_and_find(*targets, rows, supports).cpu()
            else:
                found = score_of(*targets, choices, ids_for(supports or None, rows, response.to(device))).cpu()
            for whole, part in zip((old, entropies, ranks), found.float().unbind(-1)):
                whole[rows, : tokens.shape[1]] = torch.zeros(tokens.shape).masked_scatter(response, part)
            if critic is not None and values is not None:
                values[rows, : tokens.shape[1]] = critic(states, tokens.to(device), response.to(device), seen).cpu()
    if view == "shadow":
        checked = slice(None) if only is None else only
        gap, mask = (old - sampled.sampler_logprobs)[checked], sampled.mask[checked]
        check_replay(gap, mask, next(model.parameters()).dtype)
    sampled = replace(sampled, supports=tuple(supports) or None)
    if reference is None:
        return Scored(sampled, old, entropies, ranks, values=values, view=view, seen=marked, routes=routes.found)
    references = torch.zeros_like(old)
    with reference as other, evaluating(other), fused(other), long_rows(other):
        for rows in micro_batches:
            tokens, response, choices = _cut(sampled, rows, device)
            seen = seen_by(model, sampled, rows, (reference_view or view) == "shadow", packing)
            ids = ids_for(sampled.supports, rows, response.to(device))
            logprobs = batch_logprobs(
                other, tokens.to(device), response.to(device), temperature, seen, None, choices, ids
            )
            references[rows, : tokens.shape[1]] = logprobs.cpu()
    return Scored(sampled, old, entropies, ranks, references, values, view, marked, routes.found)


def ratio_baseline(scored: Scored, correction: Correction) -> Tensor:
    """The log-probs that a correction uses as old: the recomputed ones; or the sampler's own for naive, and for all
    rows if only some were scored. fp32 [N, T]
    """
    own = correction.old == "sampler" or scored.seen is not None
    return scored.sampled.sampler_logprobs if own else scored.old_logprobs


def accepted_rows(scored: Scored, correction: Correction) -> Tensor:
    """The trajectories that a correction does not reject. bool [N]"""
    return accept(_corrected_gap(scored, correction), scored.sampled.mask, correction)


def apply_correction(scored: Scored, correction: Correction, accepted: Tensor | None = None) -> Corrected:
    """The correction of a whole step, before weights are normalised, so that its rows can be cut into optimizer steps.

    `accepted`: the result of `accepted_rows`, if it is known already
    """
    return correct_rows(_corrected_gap(scored, correction), scored.sampled.mask, correction, accepted)


def _corrected_gap(scored: Scored, correction: Correction) -> Tensor:
    """The gap on which a correction acts; 0 for naive."""
    return ratio_baseline(scored, correction) - scored.sampled.sampler_logprobs


def make_batches(
    scored: Scored,
    corrected: Corrected,
    advantages: Tensor,
    correction: Correction,
    loss: Loss,
    minibatches: int,
    pairs: Pairs | None = None,
    group_size: int = 1,
    returns: Tensor | None = None,
) -> list[Batch]:
    """One batch per optimizer step, trajectories in the given order.

    corrected: `apply_correction` of the same N trajectories; its weights are normalised here. advantages [N] or
    [N, T]. group_size: how many neighbours must stay in one optimizer step. returns [N, T]: the targets of a critic
    """
    batches = []
    for rows in minibatch_rows(len(advantages), minibatches, group_size):
        part = scored.rows(rows)
        sampled = part.sampled
        kept = normalise_weights(corrected.rows(rows), sampled.mask, correction)
        batches.append(
            Batch(
                tokens=sampled.tokens,
                lengths=sampled.lengths,
                mask=kept.mask,
                old_logprobs=ratio_baseline(part, correction),
                reference_logprobs=part.reference_logprobs,
                advantages=advantages[rows].float(),
                weights=kept.weights,
                scale=token_scale(kept.mask, kept.accepted, loss),
                response_tokens=int(sampled.mask.sum()),
                owner_rank=sampled.owner_rank,
                traces=sampled.traces if scored.view == "shadow" else None,
                supports=sampled.supports,
                clip_kl=correction.clip_kl,
                pairs=None if pairs is None else pairs.rows(rows),
                old_values=part.values,
                returns=None if returns is None else returns[rows].float(),
                routes=part.routes,
                choices=sampled.choices,
            )
        )
    return batches


def minibatch_rows(count: int, minibatches: int, group_size: int = 1) -> list[Tensor]:
    """Divide `count` rows among optimizer steps; `group_size` neighbours stay together."""
    return [rows.reshape(-1) for rows in torch.arange(count).view(-1, group_size).tensor_split(minibatches)]


def seen_by(
    model: nn.Module,
    record: Sampled | Batch,
    rows: Tensor,
    shadow: bool,
    packing: bool = False,
    routes: Routes | None = None,
) -> Replay | None:
    """What the queries of some rows see, and whether the rows go through the model as one packed row.

    None: every query sees everything before it, and rows go one by one, as in stock attention. routes [N]: packed rows
    share tokens only as long as these agree.
    """
    traces = [record.traces[i] for i in rows.tolist()] if shadow and record.traces is not None else None
    assert not shadow or traces is not None, "a batch of the dense view has no traces"
    lengths = record.lengths[rows]
    tokens = record.tokens[rows, : int(lengths.max())]
    if packing and (packed := packed_replay(model, tokens, lengths, traces, told_by(routes, rows))) is not None:
        return packed
    if traces is None:
        return None
    return replay_of(model, [(row[:n], trace) for row, n, trace in zip(tokens, lengths.tolist(), traces)])


def _cut(sampled: Sampled, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, response mask and choices of some rows on a device, without unneeded padding."""
    width = int(sampled.lengths[rows].max())
    choices = None if sampled.choices is None else sampled.choices[rows, :width].to(device)
    return sampled.tokens[rows, :width], sampled.mask[rows, :width], choices


Record = TypeVar("Record", Sampled, Scored)


def _rows(record: Record, index: Tensor) -> Record:
    """A record with only some rows of every tensor."""
    return replace(record, **{name: value[index] for name, value in vars(record).items() if isinstance(value, Tensor)})
