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
    return model


def beacon_of(model: nn.Module) -> BeaconEmbedding | None:
    """The embedding that holds a model's beacon, inside whatever wraps the model."""
    return next((module for module in model.modules() if isinstance(module, BeaconEmbedding)), None)


def check_chunk(chunk: int) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 2:
        raise SparseRLError(f"a beacon stands for {chunk!r} tokens; it must be a whole number from 2 on (with 1 it would save nothing).")


# ------------------------------------------------------------------------------------------------------------ where beacons stand


def every(chunk: int, tokens: int) -> Tensor:
    """After which of a response's tokens a beacon is fed. The last token is never fed, so nothing follows it or the one before. bool [n]"""
    place = torch.arange(1, tokens + 1)
    return (place % chunk == 0) & (place < tokens - 1)


def drawn(sizes: tuple[int, ...], tokens: int, stream: int) -> Tensor:
    """The same with every chunk's size drawn anew from `sizes`. bool [n]"""
    choices = torch.randint(len(sizes), (tokens,), generator=torch.Generator().manual_seed(stream))
    last = torch.tensor(sizes)[choices].cumsum(0) - 1
    ends = torch.zeros(tokens, dtype=torch.bool)
    ends[last[last < tokens - 2]] = True
    return ends


def lay_out(tokens: Tensor, num_prompt_tokens: int, ends: Tensor, beacon_id: int) -> Tensor:
    """Tokens with a beacon after every response token that ends a chunk. tokens [T - w], ends bool [n] -> [T]"""
    ends = torch.cat([ends.new_zeros(num_prompt_tokens), ends])
    place = torch.arange(len(tokens)) + ends.cumsum(0) - ends.long()  # those before each
    out = torch.full((len(tokens) + int(ends.sum()),), beacon_id, dtype=tokens.dtype)
    out[place] = tokens
    return out


def evicted_at(is_beacon: Tensor, num_prompt_tokens: int, never: int) -> Tensor:
    """When each token is gone: a chunk's after its beacon has been fed; prompt and beacons stay. bool [T] -> int64 [T]"""
    index = torch.arange(len(is_beacon))
    following = torch.where(is_beacon, index + 1, never).flip(0).cummin(0).values.flip(0)
    stays = is_beacon | (index < num_prompt_tokens)
    return torch.where(stays, never, following)


@dataclass(frozen=True)
class Beaconed:
    """A sequence as it is fed, beacons and all."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    trace: Trace  # evicted_at [L, H, T]: the same in all layers and heads
    beacon_id: int

    def response_mask(self, num_prompt_tokens: int) -> Tensor:
        """Tokens that were sampled. bool [T]"""
        return (torch.arange(len(self.tokens)) >= num_prompt_tokens) & (self.tokens != self.beacon_id)


def beaconed(beacon: BeaconEmbedding, tokens: Tensor, num_prompt_tokens: int, ends: Tensor, layers: int, heads: int) -> Beaconed:
    """From what was sampled, and the response tokens that end a chunk. tokens [P + n], ends bool [n]"""
    fed = lay_out(tokens, num_prompt_tokens, ends, beacon.id)
    dtype = trace_dtype(len(fed))
    gone = evicted_at(beacon.is_beacon(fed), num_prompt_tokens, never(dtype)).to(dtype)
    return Beaconed(fed, beacon.positions(fed), Trace(gone.expand(layers, heads, -1).contiguous()), beacon.id)


# ------------------------------------------------------------------------------------------------------------ folders


def save_beacon(folder: Path, model: nn.Module) -> None:
    """Write the beacon beside a model that was saved there, and a mark into its config."""
    found = beacon_of(model)
    about = {"chunks": json.dumps(found.chunks), "position": found.position, "vocabulary": str(found.id)}
    save_file({"beacon": found.beacon.detach().cpu().contiguous()}, Path(folder) / FILE, metadata=about)
    config = Path(folder) / "config.json"
    marked = json.loads(config.read_text(encoding="utf-8")) | {_MARK: FILE}
    config.write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")


def load_beacon(folder: Path, model: nn.Module) -> nn.Module:
    """Give a model the beacon of its folder, if it has one. A folder that has lost it is refused."""
    path = Path(folder) / FILE
    if not path.is_file():
        if getattr(model.config, _MARK, None) is not None:
            raise SparseRLError(f"{folder} was saved with a beacon, but its {FILE} is not there; copy it from where the model was trained.")
        return model
    try:
        with safe_open(path, framework="pt") as file:
            about, vector = file.metadata() or {}, file.get_tensor("beacon")
    except (SafetensorError, OSError) as error:
        raise SparseRLError(f"{path} is damaged ({error}); copy it again from where the model was trained.") from error
    embedding = model.get_input_embeddings()
    shape, expected = (*vector.shape, int(about.get("vocabulary", -1))), (embedding.embedding_dim, embedding.num_embeddings)
    if shape != expected:
        raise SparseRLError(
            f"{path} is the beacon of another model: its (width, vocabulary) is {shape}, but {folder} has {expected}; copy the right one."
        )
    return install(model, vector, tuple(json.loads(about["chunks"])), about["position"])


def without_beacon(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as the model had it before it got its beacon."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "beacon"}
