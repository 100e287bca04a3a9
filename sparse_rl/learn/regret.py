"""Regret: how much evicted tokens were missed, and how log-probs would have changed if they had stayed.

A forward pass under a trace computes the queries and keys of all tokens, whether they were evicted or not. So one more
product of queries and keys, a block of queries at a time, says how much attention each token would have received if
none had been evicted:

    A[l, h, j, s] = sum over queries q of segment s of  softmax over i <= q of (q . k_i)  at j,   mean over query heads

Segments run from one eviction to the next. The queries are those of the compressed run, so this is a counterfactual of
first order that needs no second pass; `view="dense"` takes the queries of a dense pass instead, for comparison.

    mass[j]    = sum of A[j, s] over segments from the token's eviction on                          of an evicted token
    lost[s]    = sum of A[j, s] over tokens j that are gone by then, per query                      a share of 1
    excess[s]  = (M of those evicted when s begins - the least M of as many) / M of all present     M: A from s on

`excess` is 0 for an eviction that could not be improved even if the later queries were known. Counterfactuals are
exact: with another trace, one forward pass gives the log-probs of every later token.

Shapes: L layers, H KV heads, T tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cache import Trace
from ..cache.segments import Observed
from ..cache.trace import never
from ..errors import SparseRLError, require_int
from .routes import routes_in_order
from .score import batch_logprobs, hidden_states, replay_of, routes_of

BLOCK = 128  # queries whose logits exist at a time
LOGITS = 2**20  # of a head, in a block of queries on a GPU: many small products would leave it idle


@dataclass(frozen=True)
class Regret:
    begins: Tensor  # int64 [S]: the first query of each segment; all but the first begin with an eviction
    received: Tensor  # fp32 [L, H, T, S]: A
    evicted_at: Tensor  # int64 [L, H, T]

    @property
    def mass(self) -> Tensor:
        """fp32 [L, H, T]; 0 for tokens that stayed."""
        return (self.received * self.gone).sum(-1)

    @property
    def gone(self) -> Tensor:
        """bool [L, H, T, S]: whether the queries of a segment no longer see a token."""
        return self.begins >= self.evicted_at[..., None]

    @property
    def lost(self) -> Tensor:
        """fp32 [L, H, S]"""
        return (self.received * self.gone).sum(2) / self.queries

    @property
    def queries(self) -> Tensor:
        """The number of queries in each segment. int64 [S]. The last token is never fed, so its query
        does not count.
        """
        ends = torch.cat([self.begins[1:], self.begins.new_tensor([self.evicted_at.shape[-1] - 1])])
        return (ends - self.begins).clamp(min=1)

    @property
    def to_come(self) -> Tensor:
        """M: the attention that a token would receive from the beginning of a segment on. fp32 [L, H, T, S]"""
        return self.received.flip(-1).cumsum(-1).flip(-1)

    @property
    def excess(self) -> Tensor:
        """fp32 [L, H, S]; NaN where a head evicted nothing."""
        tokens, worth = torch.arange(self.evicted_at.shape[-1], device=self.begins.device)[:, None], self.to_come
        at_once, found = max(1, 4 * LOGITS // self.evicted_at.numel()), []  # segments
        for begins, of in zip(self.begins.split(at_once), worth.split(at_once, -1), strict=True):
            gone = self.evicted_at[..., None]
            present, evicted = (tokens < begins) & (gone >= begins), gone == begins  # [L, H, T, s]
            count = evicted.sum(2)  # [L, H, s]
            cheapest = of.masked_fill(~present, torch.inf).sort(2).values
            least = torch.where(tokens < count[:, :, None], cheapest, 0.0).sum(2)
            share = ((of * evicted).sum(2) - least).clamp(min=0) / (of * present).sum(2).clamp(min=1e-12)
            found.append(share.masked_fill(count == 0, torch.nan))
        return torch.cat(found, -1)


@torch.no_grad()
def regret(model: nn.Module, tokens: Tensor, trace: Trace, view: str = "shadow") -> Regret:
    """The regret of a trajectory's evictions. tokens [T]; view: whether queries are those of the `shadow` or of a
    `dense` pass
    """
    if view not in ("shadow", "dense"):
        raise SparseRLError(f"view is {view!r}; it must be shadow or dense.")
    tokens = torch.as_tensor(tokens).to(next(model.parameters()).device)
    seen = trace if view == "shadow" else Trace(Trace.dense(*trace.evicted_at.shape).evicted_at, trace.routes)
    replay = replay_of(model, [(tokens, seen)])
    replay.observe = watch = Watch(trace)
    hidden_states(model, tokens[None], replay, routes_of(model, trace))
    return watch.regret()


def begins_of(evicted_at: Tensor) -> Tensor:
    """The first query of each segment; the last token is never fed. [L, H, T] -> [S]"""
    moments = evicted_at.unique()
    return torch.cat([moments.new_zeros(1), moments[moments < evicted_at.shape[-1] - 1]])


class Watch:
    """Watches a forward pass over one trajectory (`Replay.observe`)."""

    def __init__(self, trace: Trace):
        self.evicted_at = trace.evicted_at.to(torch.int64)
        self.begins = begins_of(self.evicted_at)
        self.received = torch.zeros(*self.evicted_at.shape, len(self.begins))
        self.passes = torch.zeros(len(self.evicted_at))

    def __call__(self, seen: Observed) -> None:
        self.received[seen.layer] += received(seen, self.begins, self.evicted_at.shape[1]).cpu()
        self.passes[seen.layer] += 1

    def regret(self) -> Regret:
        share = self.received / self.passes.clamp(min=1)[:, None, None, None]  # for layers that share slots, their mean
        return Regret(self.begins, share, self.evicted_at)


def received(seen: Observed, begins: Tensor, heads: int) -> Tensor:
    """A of one layer, without a [T, T] matrix. -> fp32 [H, T, S]; heads: those of the trace; begins: on the CPU

    A layer with fewer KV heads than the trace repeats each of them.
    """
    tokens = seen.queries.shape[2]
    keys = seen.keys[0].float()  # [Hk, T, D]
    queries = seen.queries[0].float().unflatten(0, (len(keys), -1))  # [Hk, G, T, D]
    own = min(heads, len(keys))  # there are more keys than heads where the learner expands latents
    found = keys.new_zeros(own, tokens, len(begins))
    segments = torch.searchsorted(begins, torch.arange(tokens), right=True) - 1  # of each query
    numbers, of_query = torch.arange(len(begins), device=keys.device), segments.to(keys.device)
    block = BLOCK if keys.device.type == "cpu" else max(BLOCK, LOGITS // tokens)
    for start in range(0, tokens - 1, block):
        stop = min(start + block, tokens - 1)
        probs = _attention(seen, queries[:, :, start:stop], keys[:, :stop], start)  # [Hk, G, b, stop]
        first, last = int(segments[start]), int(segments[stop - 1])
        belongs = of_query[start:stop, None] == numbers[first : last + 1]  # [b, s]
        of_heads = probs.flatten(0, 1).unflatten(0, (own, -1)).mean(1)  # [H, b, stop]
        found[:, :stop, first : last + 1] += of_heads.transpose(-1, -2) @ belongs.to(of_heads)
    return found.repeat_interleave(heads // own, 0)


def _attention(seen: Observed, queries: Tensor, keys: Tensor, start: int) -> Tensor:
    """The attention of queries from `start` on to all tokens up to themselves. queries [Hk, G, b, D],
    keys [Hk, n, D]
    """
    logits = queries @ keys[:, None].transpose(-1, -2) * seen.scaling  # [Hk, G, b, n]
    if seen.bias is not None:
        rows = slice(start, start + queries.shape[2])
        logits = logits + seen.bias[0, :, rows, : keys.shape[1]].float().view(logits.shape)
    if seen.softcap is not None:
        logits = torch.tanh(logits / seen.softcap) * seen.softcap
    place = torch.arange(keys.shape[1], device=keys.device)
    distance = start + torch.arange(queries.shape[2], device=keys.device)[:, None] - place  # [b, n]
    hidden = distance < 0
    if seen.sliding_window is not None:
        hidden |= distance >= seen.sliding_window
    logits = logits.masked_fill(hidden, -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    if seen.sinks is not None:
        total = torch.logaddexp(total, seen.sinks.float().view(*logits.shape[:2], 1, 1))
    return (logits - total).exp()


def give_back(trace: Trace, chosen: Tensor) -> Trace:
    """The trace in which some tokens are never evicted. chosen bool [L, H, T], or broadcast to it"""
    evicted_at = trace.evicted_at.to(torch.int64)
    fits = len(chosen.shape) <= 3 and all(a in (1, b) for a, b in zip(chosen.shape[::-1], evicted_at.shape[::-1]))
    if chosen.dtype != torch.bool or not fits:
        raise SparseRLError(
            f"what is given back is {chosen.dtype} {list(chosen.shape)}; it must be true or false for every (layer, KV "
            f"head, token) {list(evicted_at.shape)}, or every token, such as torch.arange({evicted_at.shape[-1]}) == 3."
        )
    given = torch.where(chosen, never(trace.evicted_at.dtype), evicted_at)
    return replace(trace, evicted_at=given.to(trace.evicted_at.dtype))


@torch.no_grad()
def counterfactuals(
    model: nn.Module, tokens: Tensor, trace: Trace, others: Sequence[Trace], temperature: float = 1.0, rows: int = 8
) -> Tensor:
    """How the log-prob of every token would change under other traces, `rows` of them per forward pass. fp32 [n, T]

    If traces have routes, every pass goes through these experts.
    """
    require_int(rows=rows)
    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens).to(device)
    found = []
    traces = [trace, *others]
    if len({it.routes is None for it in traces}) > 1:
        raise SparseRLError("some of the traces have routes and others have none; compare traces that are alike.")
    for start in range(0, len(traces), rows):
        part = [(tokens, it) for it in traces[start : start + rows]]
        repeated = tokens.expand(len(part), -1)
        targets = (torch.arange(len(tokens), device=device) > 0).expand_as(repeated)
        taken = [it.routes for _, it in part if it.routes is not None]
        routes = routes_in_order(model, taken, torch.tensor([len(tokens)] * len(taken))) if taken else None
        found.append(batch_logprobs(model, repeated, targets, temperature, replay_of(model, part), routes).cpu())
    logprobs = torch.cat(found)
    return logprobs[1:] - logprobs[0]


def regret_metrics(found: Sequence[Tensor]) -> dict[str, float]:
    """Of the summaries of some trajectories."""
    lost, excess, worst = torch.stack(list(found)).unbind(-1)
    return {
        "cache/regret/lost/mean": lost.mean().item(),
        "cache/regret/excess/mean": excess.mean().item(),
        "cache/regret/worst/max": worst.max().item(),
    }


class Digest:
    """Watches a forward pass over one trajectory, and keeps only what `regret_metrics` needs of each layer. It stays on
    the device, so nothing waits for it, and memory does not grow with the layers.
    """

    def __init__(self, trace: Trace):
        self.evicted_at = trace.evicted_at.to(torch.int64)
        self.begins = begins_of(self.evicted_at)
        self.found: list[Tensor] = []  # fp64 [4] of each pass: lost, sum of the excess, how many, largest mass

    def __call__(self, seen: Observed) -> None:
        if len(self.begins) < 2:
            return
        device, gone = seen.keys.device, self.evicted_at[seen.layer]
        share = received(seen, self.begins, len(gone))
        layer = Regret(self.begins.to(device), share[None], gone[None].to(device))
        lost, excess = mean_lost(layer), layer.excess.double()
        assert lost is not None  # there are two segments or more
        parts = (lost, excess.nansum(), (~excess.isnan()).sum(), layer.mass.max())
        self.found.append(torch.stack([part.double() for part in parts]))

    def summary(self) -> Tensor | None:
        """Share of attention lost since the first eviction, mean excess, largest mass of a token; None if no query
        followed an eviction. fp64 [3]; if layers share slots, each of them counts
        """
        if not self.found:
            return None
        lost, excess, count, worst = torch.stack(self.found).cpu().unbind(-1)
        return torch.stack([lost.mean(), excess.sum() / count.sum(), worst.max()])


def mean_lost(found: Regret) -> Tensor | None:
    """Share of attention lost since the first eviction; None if no query followed an eviction. fp64"""
    if len(found.begins) < 2:
        return None
    weights = found.queries[1:].double()
    return ((found.lost[..., 1:].double() * weights).sum(-1) / weights.sum()).mean()
