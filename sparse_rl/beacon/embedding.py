"""The beacon: one learned vector that the model reads after every chunk of its response, and into whose cache entry it folds the chunk.

    feed order   prompt, x_0 .. x_{c-1}, b_1, x_c .. x_{2c-1}, b_2, ...
    visible      a token of chunk w sees the prompt, b_1 .. b_{w-1} and its own chunk up to itself; b_w sees that and its whole chunk
    positions    tokens count on as if there were no beacons; a beacon shares the position of the last token of its chunk, or (`own`)
                 takes one of its own

So a beacon is a token, and folding a chunk is evicting it: a trace describes it. The beacon's id is the first beyond the vocabulary; in
`tokens` it stands where the beacon was fed, and everything else about it follows from where those ids stand.

The vector lives in the model's input embedding, so it is trained, moved and counted with the other weights; in a folder it lies beside an
ordinary Hugging Face model, in a file of its own. T tokens fed, n tokens of a response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import Trace
from .cache.trace import never, trace_dtype
from .errors import SparseRLError

FILE = "beacon.safetensors"
POSITIONS = ("shared", "own")
_MARK = "sparse_rl_beacon"  # in config.json: this folder has a beacon


class BeaconEmbedding(nn.Embedding):
    """A model's own input embedding (the same parameter) that knows one id more."""

    def __init__(self, base: nn.Embedding, vector: Tensor, chunks: tuple[int, ...], position: str):
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim, base.padding_idx)
        self.weight = base.weight
        self.beacon = nn.Parameter(vector.detach().to(base.weight))  # [hidden]
        self.chunks = chunks  # the tokens per beacon it is made for; none: not trained yet, or any
        self.position = position

    @property
    def id(self) -> int:
        return self.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        folds = self.is_beacon(tokens)
        known = F.embedding(tokens.masked_fill(folds, 0), self.weight, self.padding_idx)
        return torch.where(folds[..., None], self.beacon, known)

    def is_beacon(self, tokens: Tensor) -> Tensor:
        return tokens == self.id

    def positions(self, tokens: Tensor) -> Tensor:
        """RoPE positions of tokens in feed order. int64 [..., T]"""
        index = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        return index if self.position == "own" else index - self.is_beacon(tokens).cumsum(-1)


def add_beacon(model: nn.Module, chunks: tuple[int, ...] = (), position: str = "shared", seed: int = 0) -> nn.Module:
    """Give a model a beacon that looks like one more token, drawn like the others."""
    if beacon_of(model) is not None:
        raise SparseRLError("this model has a beacon already; load the model it was made from, or go on with it.")
    base = model.get_input_embeddings()
    if type(base) is not nn.Embedding:
        raise SparseRLError(f"{type(model).__name__} has a {type(base).__name__} for its tokens, which beacons do not know: not supported.")
    if position not in POSITIONS:
        raise SparseRLError(f"a beacon's position is {position!r}; it must be shared (the last token's of its chunk) or own.")
    for chunk in chunks:
        check_chunk(chunk)
    weight = base.weight.detach().float()
    noise = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(weight.device)
    return install(model, weight.mean(0) + weight.std() * noise, tuple(chunks), position)


def install(model: nn.Module, vector: Tensor, chunks: tuple[int, ...], position: str) -> nn.Module:
    model.set_input_embeddings(BeaconEmbedding(model.get_input_embeddings(), vector, chunks, position))
    setattr(model.config, _MARK, FILE)  # so that whoever saves the model says that it has one
    return model


def beacon_of(model: nn.Module) -> BeaconEmbedding | None:
    """The embedding that holds a model's beacon, inside whatever wraps the model."""
    return next((module for module in model.modules() if isinstance(module, BeaconEmbedding)), None)


def check_chunk(chunk: int) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 2 <= chunk < 2**31:
        raise SparseRLError(
            f"a beacon stands for {chunk!r} tokens; it must be a whole number from 2 on (with 1 it would save nothing), below 2^31."
        )


# ------------------------------------------------------------------------------------------------------------ where beacons stand


def every(chunk: Tensor | int, prompts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """After which tokens a beacon is fed, when one is after every `chunk` of a response. The last token is never fed, so nothing follows
    it or the one before. chunk, prompts, lengths [B] -> bool [B, T]"""
    nth = torch.arange(1, width + 1) - prompts[:, None]  # of the response
    size = torch.as_tensor(chunk).view(-1, 1)
    return (nth > 0) & (nth % size == 0) & (nth < (lengths - prompts)[:, None] - 1)


def drawn(sizes: tuple[int, ...], streams: Sequence[int], prompts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The same with every chunk's size drawn anew from `sizes`, from a random stream per row."""
    ends = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, stream, prompt, length in zip(ends, streams, prompts.tolist(), lengths.tolist(), strict=True):
        choices = torch.randint(len(sizes), (length - prompt,), generator=torch.Generator().manual_seed(stream))
        last = prompt + torch.tensor(sizes)[choices].cumsum(0) - 1
        row[last[last < length - 2]] = True
    return ends


@dataclass(frozen=True)
class Laid:
    """Sequences as they are fed, beacons and all, padded at the end."""

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B]
    sampled: Tensor  # bool [B, T]: response tokens, without beacons
    evicted_at: Tensor  # int64 [B, T]: `never` for prompt, beacons and the last chunk; the same in all layers and heads


def lay_out(tokens: Tensor, prompts: Tensor, lengths: Tensor, ends: Tensor, beacon_id: int, never: int) -> Laid:
    """Put a beacon after every token that ends a chunk. tokens int64 [B, T - beacons], prompts, lengths [B], ends bool like tokens"""
    fed = lengths + ends.sum(1)
    width, index = int(fed.max()), torch.arange(tokens.shape[1])
    place = torch.where(index < lengths[:, None], index + ends.cumsum(1) - ends.long(), width)  # padding goes where nobody looks
    laid = torch.full((len(tokens), width + 1), beacon_id).scatter(1, place, tokens)[:, :width]
    index = torch.arange(width)
    there = index < fed[:, None]
    is_beacon = (laid == beacon_id) & there
    following = torch.where(is_beacon, index + 1, never).flip(1).cummin(1).values.flip(1)  # a chunk goes when its beacon has been fed
    response = (index >= prompts[:, None]) & there & ~is_beacon
    return Laid(torch.where(there, laid, 0), fed, response, torch.where(response, following, never))


@dataclass(frozen=True)
class Beaconed:
    """A sequence as it was fed, as a trajectory holds it."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    trace: Trace  # evicted_at [L, H, T]
    beacon_id: int
    sampled: Tensor  # bool [T]: response tokens, without beacons


def beaconed(
    beacon: BeaconEmbedding, tokens: Tensor, prompts: Tensor, lengths: Tensor, ends: Tensor, layers: int, heads: int
) -> list[Beaconed]:
    """What rows have fed, from what they sampled and the tokens that ended their chunks; as `lay_out` takes them."""
    laid = lay_out(tokens, prompts, lengths, ends, beacon.id, never(torch.int32))
    positions, found = beacon.positions(laid.tokens), []
    for i, length in enumerate(laid.lengths.tolist()):
        dtype = trace_dtype(length)
        gone = laid.evicted_at[i, :length].clamp(max=never(dtype)).to(dtype).expand(layers, heads, -1).contiguous()
        found.append(Beaconed(laid.tokens[i, :length], positions[i, :length], Trace(gone), beacon.id, laid.sampled[i, :length]))
    return found


# ------------------------------------------------------------------------------------------------------------ folders


def save_beacon(folder: Path, model: nn.Module) -> None:
    """Write the beacon beside a model that was saved there; its config says that there is one."""
    found = beacon_of(model)
    about = {"chunks": json.dumps(found.chunks), "position": found.position, "vocabulary": str(found.id)}
    save_file({"beacon": found.beacon.detach().cpu().contiguous()}, Path(folder) / FILE, metadata=about)


def load_beacon(source: str | Path, model: nn.Module) -> nn.Module:
    """Give a model the beacon of its folder or hub id, if it has one. A folder that has lost it is refused."""
    path = _find(str(source)) if getattr(model.config, _MARK, None) is not None else Path(source) / FILE
    if path is None or not path.is_file():
        if getattr(model.config, _MARK, None) is not None:
            raise SparseRLError(f"{source} was saved with a beacon, but its {FILE} is not there; copy it from where the model was trained.")
        return model
    try:
        with safe_open(path, framework="pt") as file:
            about, vector = file.metadata() or {}, file.get_tensor("beacon")
        chunks, position, vocabulary = tuple(json.loads(about["chunks"])), about["position"], int(about["vocabulary"])
        for chunk in chunks:
            check_chunk(chunk)
        if position not in POSITIONS:
            raise ValueError(f"its position is {position!r}, not one of {', '.join(POSITIONS)}")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise SparseRLError(f"{path} is damaged ({error}); copy it again from where the model was trained.") from error
    embedding = model.get_input_embeddings()
    shape, expected = (*vector.shape, vocabulary), (embedding.embedding_dim, embedding.num_embeddings)
    if shape != expected:
        raise SparseRLError(
            f"{path} is the beacon of another model: its (width, vocabulary) is {shape}, but {source} has {expected}; copy the right one."
        )
    return install(model, vector, chunks, position)


def _find(source: str) -> Path | None:
    """Where the beacon of a folder, or of a model on the hub, is; None where there is none."""
    if Path(source).is_dir():
        return Path(source) / FILE
    from transformers.utils import cached_file

    found = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def without_beacon(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as the model had it before it got its beacon."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "beacon"}
