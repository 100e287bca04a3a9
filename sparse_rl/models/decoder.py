"""Where the decoder of a model is, inside whatever wraps the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from ..errors import SparseRLError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside whatever wraps it."""
    from transformers import PreTrainedModel

    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def taken_by(model: nn.Module) -> Collection[str]:
    """The arguments that the model's forward function names."""
    return _parameters(type(causal_lm_of(model)))


@functools.cache
def _parameters(kind: type) -> Collection[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


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
    if isinstance(getattr(base, "decoder", None), nn.Module):  # models that were cut out of an encoder-decoder, and OPT
        return base, "decoder"
    return causal_lm, name


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose output the head turns into logits."""
    return getattr(*decoder_place(model))
