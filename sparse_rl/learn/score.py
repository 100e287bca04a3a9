"""Score given tokens: their log-probs in the learner's view, dense (stock attention) or shadow (under a trace).

The decoder runs once over whole sequences. The head runs on chunks of the target tokens, and again during backward, so
[tokens, vocabulary] never exists: not in the model's dtype, not in fp32, not as a gradient. Scales and soft-caps of
logits are kept, because the head is the model's own forward with the decoder's output put in. On a GPU, a head that is
known to be a single matrix goes through fused kernels instead (head.py).

Shapes: B sequences, T tokens (padded at the end, where causal attention never looks), n target tokens, V vocabulary.
`target_mask` bool [B, T] marks the tokens whose log-probs are wanted; it never marks the first token of a sequence.
`choices` bool [B, T] marks those whose log-prob includes a choice between folding and continuing (beacon/choice.py):
beacons, and tokens before which the model could have folded. Without it no beacon may be a target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import Given, Replay, giving, through_backward, use_attention
from ..beacon import beacon_of, choice_entropies, choice_logprobs
from ..cache import Support, Trace
from ..cache.segments import Packing
from ..cache.ties import slots_and_ties
from ..errors import SparseRLError
from ..models import (
    causal_lm_of,
    decoder_of,
    decoder_place,
    head_chunk,
    last_logits_only,
    num_slot_heads,
    num_slot_layers,
    taken_by,
)
from ..models.routing import replaying_routes
from .head import plain_head, states_before
from .routes import routes_in_order
from .support import ids_for, over_support, padded, place_in


def token_logprobs(
    model: nn.Module,
    tokens: Tensor,
    trace: Trace | None = None,
    temperature: float = 1.0,
    choices: Tensor | None = None,
    support: Support | None = None,
) -> Tensor:
    """fp32 [T]: the log-prob of each token given those before it; 0 for the first token and for beacons that were not
    chosen. Differentiable.

    tokens, choices (a trajectory's) [T]. Without a trace, every token sees all tokens before it; with one, exactly what
    the sampler's cache still held, and it goes through the sampler's experts if the trace has routes. Temperature 0
    counts as 1, as in the sampler. With a support that has ids, log-probs of the sampled tokens are renormalised over
    it, and the others are 0.
    """
    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens, device=device)[None]
    target_mask = torch.arange(tokens.shape[1], device=device)[None] > 0
    if (beacon := beacon_of(model)) is not None:
        target_mask &= ~beacon.is_beacon(tokens)
    if choices is not None:
        choices = choices.to(device)[None]
        target_mask |= choices
    replay = None if trace is None else replay_of(model, [(tokens[0], trace)])
    routes = None if trace is None else routes_of(model, trace)
    ids = None
    if support is not None:
        target_mask &= (support.counts > 0).to(device)
        ids = ids_for([support], torch.tensor([0]), target_mask)
    return batch_logprobs(model, tokens, target_mask, temperature, replay, routes, choices, ids)[0]


def batch_logprobs(
    model: nn.Module,
    tokens: Tensor,
    target_mask: Tensor,
    temperature: float = 1.0,
    replay: Replay | None = None,
    routes: Tensor | None = None,
    choices: Tensor | None = None,
    support: Tensor | None = None,
) -> Tensor:
    """fp32 [B, T]: log-probs of the target tokens, 0 elsewhere. Differentiable.

    tokens int64 [B, T] and everything else on the model's device; `replay` for the shadow view; `routes`: see
    `hidden_states`; `support` int32 [n, K]: renormalise over these ids (support.py).
    """
    states = hidden_states(model, tokens, replay, routes)
    return logprobs_of(model, states, tokens, target_mask, temperature, choices, support)


def logprobs_of(
    model: nn.Module,
    states,
    tokens: Tensor,
    target_mask: Tensor,
    temperature: float = 1.0,
    choices: Tensor | None = None,
    support: Tensor | None = None,
) -> Tensor:
    """`batch_logprobs`, from hidden states that were computed already."""
    if choices is not None:
        assert support is None, "a policy that chooses its folds draws from all tokens"
        said, chosen = _apart(model, tokens, target_mask, choices)
        logprobs = logprobs_of(model, states, tokens, said, temperature)
        return logprobs + choice_statistics(model, states, tokens, chosen)[0]
    values = _fused_statistics(model, states, tokens, target_mask, temperature or 1.0, support)
    if values is None:
        function = chosen_logprobs(temperature or 1.0)
        values = [_over_targets(model, states, tokens, target_mask, function, support)]
    return values[0].new_zeros(tokens.shape).masked_scatter(target_mask, values[0])


def statistics_of(
    model: nn.Module,
    states,
    tokens: Tensor,
    target_mask: Tensor,
    temperature: float = 1.0,
    choices: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs_of` with the same bits and, from the same pass through the head, entropies of the targets'
    distributions and ranks of the targets in them (1: likeliest). fp32 [B, T] each, 0 elsewhere. Only log-probs are
    differentiable.
    """
    if choices is not None:
        said, chosen = _apart(model, tokens, target_mask, choices)
        of_tokens = statistics_of(model, states, tokens, said, temperature)
        of_choices = choice_statistics(model, states, tokens, chosen)
        ranks = torch.where(said, of_tokens[2], of_choices[2])
        return of_tokens[0] + of_choices[0], of_tokens[1] + of_choices[1].detach(), ranks
    temperature = temperature or 1.0
    values = _fused_statistics(model, states, tokens, target_mask, temperature, support)
    if values is None:
        both = _over_targets(model, states, tokens, target_mask, _logprobs_and_others(temperature), support)
        values = both.unbind(-1)
    logprobs, entropies, ranks = (v.new_zeros(tokens.shape).masked_scatter(target_mask, v) for v in values)
    return logprobs, entropies.detach(), ranks.detach()


def score_of(
    model: nn.Module,
    states,
    tokens: Tensor,
    target_mask: Tensor,
    temperature: float,
    choices: Tensor | None = None,
    support: Tensor | None = None,
) -> Tensor:
    """Log-probs, entropies and ranks of the target tokens, side by side. fp32 [n, 3]"""
    if choices is not None:
        return torch.stack(statistics_of(model, states, tokens, target_mask, temperature, choices), -1)[target_mask]
    values = _fused_statistics(model, states, tokens, target_mask, temperature, support)
    if values is None:
        function = logprobs_entropies_ranks(temperature)
        return _over_targets(model, states, tokens, target_mask, function, support)
    return torch.stack(values, -1)


def _over_targets(
    model: nn.Module,
    states,
    tokens: Tensor,
    target_mask: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    support: Tensor | None,
) -> Tensor:
    """`over_chunks` of a function of logits and targets, or of the logits of a support."""
    if support is None:
        return over_chunks(model, states, target_mask, function, tokens[target_mask])
    return over_chunks(model, states, target_mask, over_support(function), tokens[target_mask], support)


def _fused_statistics(
    model: nn.Module, states, tokens: Tensor, target_mask: Tensor, temperature: float, support: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probs, entropies and ranks of the target tokens, [n] each; None if the head is not known to be one matrix."""
    known = plain_head(causal_lm_of(model))
    if known is None:
        return None
    before, targets = states_before(states.last_hidden_state, target_mask), tokens[target_mask]
    if support is None:
        return known.statistics(before, targets, temperature, chunk_of(model))
    chosen = padded(known.logits_at(before, support, chunk_of(model)), support)
    logprobs, entropies, ranks = logprobs_entropies_ranks(temperature)(chosen, place_in(support, targets)).unbind(-1)
    return logprobs, entropies, ranks


def choice_statistics(model: nn.Module, states, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and ranks (1 or 2) of choices between folding and continuing. chosen bool
    [B, T] -> [B, T]
    """
    beacon = beacon_of(model)
    if beacon is None or beacon.choice is None:
        raise SparseRLError(
            "the trajectories hold choices of where to fold, but this model cannot make such choices; use the model "
            "that sampled them."
        )
    logits, folds = beacon.choice_logits(states_before(states.last_hidden_state, chosen)), beacon.is_beacon(tokens)
    logits = logits.new_zeros(tokens.shape).masked_scatter(chosen, logits)
    values = choice_logprobs(logits, folds), choice_entropies(logits), 1 + ((logits > 0) != folds)
    return values[0] * chosen, values[1] * chosen, values[2].to(logits.dtype) * chosen


def _apart(model: nn.Module, tokens: Tensor, target_mask: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Split targets into tokens of the vocabulary and choices about folding. bool [B, T] each"""
    beacon = beacon_of(model)
    said = target_mask if beacon is None else target_mask & ~beacon.is_beacon(tokens)
    return said, target_mask & choices


def hidden_states(model: nn.Module, tokens: Tensor, replay: Replay | None = None, routes: Tensor | None = None):
    """The decoder's output, as the model's own output record.

    tokens [B, T] -> last_hidden_state [B, T, hidden]. With a packing (packing.py) the decoder reads one packed row.
    routes [M, n, k]: the experts to which tokens are sent (routes.py); None: the model chooses.
    """
    decoder, caught = decoder_of(model), []
    hook = decoder.register_forward_hook(lambda module, args, output: caught.append(output))
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    packing, beacon = None if replay is None else replay.packing, beacon_of(model)
    if replay is not None and packing is not None:
        inputs["input_ids"], positions = pack_tokens(tokens, replay.lengths, packing)
    elif beacon is not None:
        positions = beacon.positions(tokens)
    if "position_ids" in taken_by(model):  # counted as in the engine: some models would begin with another number
        inputs["position_ids"] = positions
    inputs |= last_logits_only(model, inputs["input_ids"])  # the head is run later
    try:
        if replay is None and routes is None:
            model(**inputs)
        else:
            with through_backward(model, lambda: _replaying(model, Given(positions, replay=replay), routes)):
                model(**inputs)
    finally:
        hook.remove()
    if not caught:
        raise SparseRLError(
            f"{type(causal_lm_of(model)).__name__} does not run its decoder as a whole: its log-probs are not "
            "supported."
        )
    states = caught[0]
    if packing is not None:  # as a lookup, whose backward adds up the gradients of shared tokens in fp32
        states.last_hidden_state = nn.functional.embedding(packing.place, states.last_hidden_state[0])
    if beacon is not None:  # a token after a beacon was predicted by the state before the beacon
        after = states.last_hidden_state
        states.last_hidden_state = torch.where(beacon.is_beacon(tokens)[..., None], after.roll(1, 1), after)
    return states


@contextmanager
def _replaying(model: nn.Module, given: Given, routes: Tensor | None) -> Iterator[None]:
    attention = nullcontext() if given.replay is None else use_attention(model, "shadow")
    with attention, giving(given), nullcontext() if routes is None else replaying_routes(model, routes):
        yield


def routes_of(model: nn.Module, trace: Trace) -> Tensor | None:
    """The routes of one trajectory, for `hidden_states`."""
    if trace.routes is None:
        return None
    return routes_in_order(model, [trace.routes], torch.tensor([trace.num_tokens]))


def pack_tokens(tokens: Tensor, lengths: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The tokens of a packed row, and their positions. [B, T] -> [1, S], [1, S]"""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    there = index < lengths[:, None]
    row, positions = torch.zeros(2, packing.size, dtype=torch.int64, device=tokens.device).unbind()
    row[packing.place[there]], positions[packing.place[there]] = tokens[there], index[there]
    return row[None], positions[None]


def over_chunks(
    model: nn.Module, states, target_mask: Tensor, function: Callable[..., Tensor], *per_token: Tensor
) -> Tensor:
    """function(logits fp32 [c, V], *per_token [c]) -> [c, ...] for chunks of the target tokens, put together: [n, ...].

    The logits of a token are those that predict it, from the state before it.
    """
    before = states.last_hidden_state[:, :-1][target_mask[:, 1:]]  # [n, hidden]

    def chunk(part: Tensor, *others: Tensor) -> Tensor:
        return function(head(model, states, part), *others)

    size = chunk_of(model)
    parts = zip(before.split(size), *(p.split(size) for p in per_token), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def head(model: nn.Module, states, hidden: Tensor) -> Tensor:
    """The model's logits for given hidden states, in fp32 or wider. [n, hidden] -> [n, V]"""
    causal_lm = causal_lm_of(model)
    given = copy.copy(states)
    given.last_hidden_state = hidden[None]
    holder, name = decoder_place(model)
    decoder = getattr(holder, name)
    setattr(holder, name, _FixedOutput(given, decoder))
    try:
        logits = causal_lm(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64), use_cache=False).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
    finally:
        setattr(holder, name, decoder)


def chosen_logprobs(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function for `over_chunks`: log-probs of the targets."""

    def function(logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits / temperature
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)

    return function


def logprobs_entropies_ranks(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function for `over_chunks`: log-prob, entropy and rank (1: likeliest) of each target. -> [n, 3]"""

    def function(logits: Tensor, targets: Tensor) -> Tensor:
        logprobs = (logits / temperature).log_softmax(-1)
        chosen = logprobs.gather(1, targets[:, None])
        ranks = 1 + (logprobs > chosen).sum(-1)
        return torch.stack([chosen[:, 0], -(logprobs.exp() * logprobs).sum(-1), ranks.to(logprobs.dtype)], dim=-1)

    return function


def _logprobs_and_others(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function for `over_chunks`: `chosen_logprobs`, and entropies and ranks without a gradient. -> [n, 3]"""
    chosen, others = chosen_logprobs(temperature), logprobs_entropies_ranks(temperature)

    def function(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([chosen(logits, targets)[:, None], others(logits.detach(), targets)[:, 1:]], 1)

    return function


def replay_of(model: nn.Module, items: Sequence[tuple[Tensor, Trace]]) -> Replay:
    """What the queries of several (tokens, trace) pairs could see, after a check that each trace fits its tokens."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(tokens) for tokens, _ in items])
    slots, ties = slots_and_ties([trace for _, trace in items], device)
    return Replay(pad_traces(model, items).to(device), lengths.to(device), slots=slots, ties=ties)


def pad_traces(model: nn.Module, items: Sequence[tuple[Tensor, Trace]]) -> Tensor:
    """Stack the traces, padded with "never": int32 [B, L, H, T]"""
    config = causal_lm_of(model).config.get_text_config(decoder=True)
    layers, heads, longest = num_slot_layers(config), num_slot_heads(config), max(len(tokens) for tokens, _ in items)
    padded = torch.full((len(items), layers, heads, longest), torch.iinfo(torch.int32).max, dtype=torch.int32)
    if beacon_of(model) is None and (highest := max(int(tokens.max()) for tokens, _ in items)) >= config.vocab_size:
        raise SparseRLError(
            f"the tokens hold id {highest}, outside this model's vocabulary of {config.vocab_size}: it is a beacon's "
            "or another tokenizer's; use the model that sampled them."
        )
    for row, (tokens, trace) in zip(padded, items, strict=True):
        expected = (layers, heads, len(tokens))
        if tuple(trace.evicted_at.shape) != expected:
            raise SparseRLError(
                f"the trace is for (layers, KV heads, tokens) {tuple(trace.evicted_at.shape)} but this model and these "
                f"tokens have {expected}; it belongs to another trajectory or another model."
            )
        row[..., : len(tokens)] = trace.evicted_at.to(torch.int32)
        if (row[..., : len(tokens)] <= torch.arange(len(tokens))).any():
            raise SparseRLError(
                "the trace says that a token was evicted before it was fed: it is damaged; sample the trajectory again."
            )
    return padded


class _FixedOutput(nn.Module):
    """A stand-in for the decoder that has its plain settings and returns a given output."""

    def __init__(self, output, decoder: nn.Module):
        super().__init__()
        settings = vars(decoder).items()
        vars(self).update({k: v for k, v in settings if k not in vars(self) and isinstance(v, (bool, int, float, str))})
        self.output = output

    def forward(self, *args, **kwargs):
        return self.output


def chunk_of(model: nn.Module) -> int:
    """Tokens whose logits exist at a time."""
    return head_chunk(causal_lm_of(model).config.get_text_config(decoder=True).vocab_size)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers, whatever the decoder calls them."""
    return next(child for child in decoder_of(model).children() if isinstance(child, nn.ModuleList))
