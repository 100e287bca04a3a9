"""Find the decoder of a model, inside anything that wraps the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import SparseRLError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside anything that wraps it."""
    from transformers import PreTrainedModel

    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def taken_by(model: nn.Module) -> Collection[str]:
    """The arguments that the model's forward function names."""
    return _parameters(type(causal_lm_of(model)))


@functools.cache
def _parameters(kind: type) -> Collection[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def last_logits_only(model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """The argument that makes the head compute only the logits of the last token, if the model takes one. [B, T]

    If layers share keys and values, a number would also make the decoder drop the other tokens from its last layers
    (Gemma 4 since transformers 5.23), but compressors and the learner need their queries. A tensor of places does not.
    """
    if "logits_to_keep" not in taken_by(model):
        return {}
    shares = getattr(causal_lm_of(model).config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    if not shares or tokens.shape[1] == 1:  # a captured step has one token and must not make tensors on the host
        return {"logits_to_keep": 1}
    return {"logits_to_keep": torch.full((1,), tokens.shape[1] - 1, device=tokens.device)}


def decoder_place(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the decoder, and the decoder's name there."""
    causal_lm = causal_lm_of(model)
    name = causal_lm.base_model_prefix
    if not hasattr(causal_lm, name) and hasattr(
        causal_lm, "model"
    ):  # Llama 4, where the prefix is that of a larger model
        name = "model"
    base = getattr(causal_lm, name, None)
    if base is None:
        raise SparseRLError(f"{type(causal_lm).__name__} has no decoder named {name!r}: it is not supported.")
    if isinstance(getattr(base, "decoder", None), nn.Module):  # models cut out of an encoder-decoder, and OPT
        return base, "decoder"
    return causal_lm, name


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose output the head turns into logits."""
    return getattr(*decoder_place(model))
