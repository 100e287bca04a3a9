"""Measure a model for the compressor `triattention`: how RoPE rotates its queries, and their mean before rotation.

A dense forward pass over text gives the queries of every layer as its attention sees them, so norms, biases and scales
of the model are included. They are rotated back by their positions and averaged in fp64.

How RoPE rotates them is found by feeding single tokens. A token that is alone attends only to itself, so all layers
have the same states at any position, and a query at position p is the query at position 0, rotated. Which of the
model's own frequencies do that, on which pairs of dimensions, is found by trying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..attention import Given, Replay, giving, use_attention
from ..cache.segments import Observed
from ..errors import SparseRLError
from ..models import Companion, ModelShape, evaluating, set_companion
from .score import hidden_states

PIECE = 2048  # tokens that see each other, at most
PROBES, PLACES = 16, (1, 29, 811)  # single tokens, and where they are fed
_NEVER = torch.iinfo(torch.int32).max


@torch.no_grad()
def calibrate(model: nn.Module, sequences: Iterable[Sequence[int]], tokens: int = 32_768) -> Companion:
    """Measure a model on the first `tokens` tokens of some text, and let it carry what `triattention` reads."""
    config = model.config
    shape = ModelShape.of(config, next(model.parameters()).dtype)
    if shape.latent or shape.by_layer:
        kind = "latents in place of keys" if shape.latent else "other keys in some layers than in others"
        raise SparseRLError(f"{shape.architecture} keeps {kind}, which triattention cannot score; use another one.")
    with evaluating(model):
        frequency, partner = find_rotation(model, shape)
        sums = torch.zeros(2, shape.slot_layers, shape.query_heads, shape.head_dim, dtype=torch.float64)
        counts, seen = torch.zeros(shape.slot_layers, dtype=torch.int64), 0
        for piece in _pieces(sequences, tokens):
            _check_ids(piece, shape.vocabulary)
            _feed(model, torch.tensor(piece), partial(_add, sums, counts, frequency, partner))
            seen += len(piece)
    if not seen:
        raise SparseRLError("there is no text to calibrate on; give at least one sequence of two tokens.")
    mean, modulus = (sums / counts[:, None, None]).float()
    found = {"mean": mean, "modulus": modulus, "frequency": frequency, "partner": partner}
    companion = Companion(found, {"tokens": str(seen), "architecture": shape.architecture})
    set_companion(model, "triattention", companion)
    return companion


def _pieces(sequences: Iterable[Sequence[int]], tokens: int) -> Iterator[Sequence[int]]:
    left = tokens
    for sequence in sequences:
        for start in range(0, len(sequence), PIECE):
            piece = sequence[start : start + PIECE][:left]
            if len(piece) > 1:
                yield piece
                left -= len(piece)
            if left <= 1:
                return


def _check_ids(piece: Sequence[int], vocabulary: int) -> None:
    for token in (min(piece), max(piece)):
        if not 0 <= token < vocabulary:
            raise SparseRLError(
                f"the text to calibrate on holds token id {token}, outside the vocabulary of {vocabulary}; was it made "
                "with another tokenizer?"
            )


def _feed(model: nn.Module, tokens: Tensor, observe) -> None:
    tokens = tokens.to(next(model.parameters()).device)[None]
    hidden_states(model, tokens, _seeing_all(tokens, observe))


def _seeing_all(tokens: Tensor, observe) -> Replay:
    """Nothing is evicted. tokens [B, T]"""
    rows, length = tokens.shape
    evicted_at = torch.full((rows, 1, 1, length), _NEVER, dtype=torch.int32, device=tokens.device)
    return Replay(evicted_at, torch.full((rows,), length, device=tokens.device), observe=observe)


def _add(sums: Tensor, counts: Tensor, frequency: Tensor, partner: Tensor, seen: Observed) -> None:
    """Add the queries of a layer, turned back, and the moduli of their components. sums fp64 [2, L, Hq, D]"""
    queries, device = seen.queries[0].double(), seen.queries.device  # [Hq, T, D]
    place = torch.arange(queries.shape[1], device=device)
    turn, pair = frequency[seen.layer].to(device), partner[seen.layer].to(device)
    back = rotate(queries, turn, pair, -place)
    other = back[..., pair]
    alone = pair == torch.arange(len(pair), device=device)
    moduli = torch.where(alone, back.abs(), torch.hypot(back, other))
    sums[0, seen.layer] += back.sum(1).cpu()
    sums[1, seen.layer] += moduli.sum(1).cpu()
    counts[seen.layer] += queries.shape[1]


def rotate(x: Tensor, frequency: Tensor, partner: Tensor, place: Tensor) -> Tensor:
    """RoPE in fp64: x [..., T, D] turned as at the places [T]; frequency, partner [D]."""
    dims = torch.arange(len(partner), device=x.device)
    sign = torch.where(dims < partner, -1.0, 1.0) * (dims != partner)
    angles = place[:, None].double() * frequency.double()
    return x * angles.cos() + sign * x[..., partner] * angles.sin()


def find_rotation(model: nn.Module, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """By layer: the frequency of every dimension, fp64 [L, D], and its partner, int64 [L, D]."""
    at_zero = _queries_at(model, shape, 0)
    places = [place for place in PLACES if place < shape.context]
    elsewhere = [_queries_at(model, shape, place) for place in places]
    candidates = list(_rotations(model, shape.head_dim))
    chosen = [_fitting(layer, at_zero, elsewhere, places, candidates, shape) for layer in range(shape.slot_layers)]
    return torch.stack([frequency for frequency, _ in chosen]), torch.stack([partner for _, partner in chosen])


def _fitting(layer: int, at_zero, elsewhere, places, candidates, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """The rotation that turns a layer's queries as the model did."""
    tolerance = 1e-3 if shape.dtype in (torch.float32, torch.float64) else 3e-2
    for frequency, partner in candidates:
        errors = [
            (rotate(at_zero[layer], frequency, partner, torch.tensor([place])) - there[layer]).norm()
            for place, there in zip(places, elsewhere, strict=True)
        ]
        if max(errors) < tolerance * at_zero[layer].norm():
            return frequency, partner
    raise SparseRLError(
        f"layer {layer} of {shape.architecture} does not turn its queries by one of the model's RoPE frequencies, in "
        "halves or in neighbours: triattention does not know it; use another compressor."
    )


def _queries_at(model: nn.Module, shape: ModelShape, place: int) -> dict[int, Tensor]:
    """The queries of some tokens, each fed alone at a position. -> by layer, fp64 [tokens, Hq, 1, D]"""
    device = next(model.parameters()).device
    ids = torch.linspace(0, shape.vocabulary - 1, PROBES, device=device).long()[:, None]
    found: dict[int, Tensor] = {}
    replay = _seeing_all(ids, lambda seen: found.setdefault(seen.layer, seen.queries.double().cpu()))
    positions = torch.full_like(ids, place)
    with use_attention(model, "shadow"), giving(Given(positions, replay=replay)):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    return found


def _rotations(model: nn.Module, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a model may do: its frequencies on halves or on neighbours of the first dimensions, and nothing."""
    dims = torch.arange(dim)
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq") or buffer.dim() != 1 or 2 * len(buffer) > dim:
            continue
        frequencies, half = buffer.double().cpu(), len(buffer)
        turned = dims < 2 * half
        for of_dim, partner in (
            (dims % half, torch.where(dims < half, dims + half, dims - half)),
            (dims // 2, dims ^ 1),
        ):
            frequency = torch.where(turned, frequencies[of_dim.clamp(max=half - 1)], 0.0)
            yield frequency, torch.where(turned, partner, dims)
    yield torch.zeros(dim, dtype=torch.float64), dims
