"""The beacon: a learned vector that the model reads after every chunk of its response, and whose entry replaces it.

    feed order   prompt, x_0 .. x_{c-1}, b_1, x_c .. x_{2c-1}, b_2, ...
    visible      a token of chunk w sees the prompt, b_1 .. b_{w-1} and its own chunk up to itself;
                 b_w sees the same and its whole chunk
    positions    tokens are counted as if there were no beacons; a beacon shares the position of the last token of its
                 chunk, or (`own`) has its own position

So a beacon is a token, and folding a chunk means evicting it, which a trace describes. The beacon's id is the first one
beyond the vocabulary. It stands in `tokens` where a beacon was fed, and everything else follows from these places.

The vector belongs to the model's input embedding, so it is trained, moved and counted with the other weights. On disk
it has its own file beside an ordinary Hugging Face model. T tokens fed, n tokens of a response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.states import RECURRENT_LAYERS
from ..errors import SparseRLError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)

FILE = "beacon.safetensors"
POSITIONS = ("shared", "own")
MARK = "sparse_rl_beacon"  # in config.json: this folder has a beacon


class BeaconEmbedding(nn.Embedding):
    """A model's own input embedding (the same parameter) with one more id."""

    def __init__(self, base: nn.Embedding, vector: Tensor, chunks: tuple[int, ...], position: str):
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim, base.padding_idx)
        self.weight = base.weight
        self.beacon = nn.Parameter(vector.detach().to(base.weight))  # [hidden]
        self.chunks = chunks  # the tokens per beacon it was trained for; empty: not trained yet, or any number
        self.position = position
        self.choice: tuple[int, int] | None = None  # least and most tokens, if the model chooses its folds (choice.py)
        self.choice_weight: nn.Parameter | None = None  # [hidden]
        self.choice_bias: nn.Parameter | None = None  # [1]

    @property
    def id(self) -> int:
        return self.num_embeddings

    def forward(self, input: Tensor) -> Tensor:
        folds = self.is_beacon(input)
        known = F.embedding(input.masked_fill(folds, 0), self.weight, self.padding_idx)
        return torch.where(folds[..., None], self.beacon, known)

    def is_beacon(self, tokens: Tensor) -> Tensor:
        return tokens == self.id

    def set_choice(self, weight: Tensor, bias: Tensor, choice: tuple[int, int]) -> None:
        self.choice_weight, self.choice_bias = nn.Parameter(weight), nn.Parameter(bias)
        self.choice = choice

    def choice_logits(self, hidden: Tensor) -> Tensor:
        """The logits z of choice.py from states, in fp32. [..., hidden] -> [...]"""
        assert self.choice_weight is not None and self.choice_bias is not None
        return (hidden.float() * self.choice_weight.float()).sum(-1) + self.choice_bias.float()

    def positions(self, tokens: Tensor) -> Tensor:
        """RoPE positions of tokens in feed order. int64 [..., T]"""
        index = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        return index if self.position == "own" else index - self.is_beacon(tokens).cumsum(-1)


def add_beacon(model: Model, chunks: tuple[int, ...] = (), position: str = "shared", seed: int = 0) -> Model:
    """Give a model a beacon: a vector with the mean and the spread of its token embeddings."""
    if beacon_of(model) is not None:
        raise SparseRLError("this model has a beacon already; use it as it is, or load the model it was made from.")
    base = cast("PreTrainedModel", model).get_input_embeddings()
    if type(base) is not nn.Embedding:
        raise SparseRLError(
            f"{type(model).__name__} embeds its tokens with a {type(base).__name__}, not an nn.Embedding, so it cannot "
            "have a beacon; use another model."
        )
    if position not in POSITIONS:
        raise SparseRLError(
            f"the position of a beacon is {position!r}; it must be shared (with the last token of its chunk) or own."
        )
    for chunk in chunks:
        check_chunk(chunk)
    weight = base.weight.detach().float()
    noise = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(weight.device)
    return install(model, weight.mean(0) + weight.std() * noise, tuple(chunks), position)


def install(model: Model, vector: Tensor, chunks: tuple[int, ...], position: str) -> Model:
    """Put a beacon into a model's input embedding."""
    transformer = cast("PreTrainedModel", model)
    base = transformer.get_input_embeddings()
    assert isinstance(base, nn.Embedding)
    kinds = getattr(transformer.config.get_text_config(decoder=True), "layer_types", None) or ()
    if RECURRENT_LAYERS.intersection(kinds):
        raise SparseRLError(
            f"{type(model).__name__} has recurrent layers, whose states would keep both a beacon and the tokens that "
            "it stands for, so it cannot have a beacon; use another model."
        )
    transformer.set_input_embeddings(BeaconEmbedding(base, vector, chunks, position))
    setattr(transformer.config, MARK, FILE)  # saved with the model, so that a lost beacon file is noticed
    return model


def beacon_of(model: nn.Module) -> BeaconEmbedding | None:
    """The embedding that holds a model's beacon, inside anything that wraps the model; None without one."""
    return next((module for module in model.modules() if isinstance(module, BeaconEmbedding)), None)


def check_chunk(chunk: int) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 2 <= chunk < 2**31:
        raise SparseRLError(
            f"a beacon stands for {chunk!r} tokens; it must be a whole number from 2 on (with 1 it would save "
            "nothing), below 2^31."
        )
