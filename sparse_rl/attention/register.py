"""Switch a transformers model to one of our attentions and back. Only this module touches the attention registry.

Nothing is registered before the first use, and the model leaves every `with` as it entered it. No mask function is
registered: without one transformers builds no mask at all, and our attentions make their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..errors import SparseRLError
from .shadow import shadow_attention
from .slots import slots_attention
from .written_out import check_positions, replaced_methods, writes_attention_out

ATTENTIONS = {"slots": slots_attention, "shadow": shadow_attention}


@contextmanager
def use_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Run `model` with the attention `name`, then restore the one it had before."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, ATTENTIONS[name])
    configs = _attention_configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        if not writes_attention_out(model):
            _set_attention(model, name)
            stuck = [type(config).__name__ for config in configs if config._attn_implementation != name]
            if stuck:
                decoder = _outermost(model).config.get_text_config(decoder=True)
                where = "its decoder" if decoder._attn_implementation != name else "a part beside its decoder"
                raise SparseRLError(
                    f"{type(model).__name__} does not let its attention be replaced ({', '.join(stuck)}): {where} "
                    "writes it out in code of its own and does not call transformers' attention interface."
                )
        check_positions(model)
        with replaced_methods(model, ATTENTIONS[name]):
            yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


@contextmanager
def through_backward(model: nn.Module, switched: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Run a forward pass with gradients within `switched()`, also under gradient checkpointing.

    Checkpointing runs layers again during backward, long after this block has ended, when the model is as it was
    before. So each checkpointed layer is told to switch once more while it recomputes. Contexts of the layer's own
    checkpointing (learn/selective.py) stay, within the switch, so that they see the same operations both times.
    """
    layers: list[Any] = [
        m
        for m in model.modules()
        if getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func")
    ]
    before = [layer._gradient_checkpointing_func for layer in layers]

    def checkpointing(original):
        own = getattr(original, "keywords", {}).get("context_fn", lambda: (nullcontext(), nullcontext()))

        def contexts():
            forward, again = own()

            @contextmanager
            def switched_again():
                with switched(), again:
                    yield

            return forward, _Again(switched_again)

        def call(function, *args, **kwargs):
            return original(function, *args, **{**kwargs, "use_reentrant": False, "context_fn": contexts})

        return call

    try:
        for layer, original in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = checkpointing(original)
        with switched():
            yield
    finally:
        for layer, original in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = original


class _Again:
    """A context that can be entered any number of times: with `retain_graph`, layers are recomputed more than once."""

    def __init__(self, make):
        self.make, self.entered = make, []

    def __enter__(self):
        self.entered.append(self.make())
        return self.entered[-1].__enter__()

    def __exit__(self, *exception):
        return self.entered.pop().__exit__(*exception)


def _attention_configs(model: nn.Module) -> list:
    """The distinct configs from which attention layers read their implementation, outer before inner."""
    from transformers import PreTrainedModel

    return list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())


def _set_attention(model: nn.Module, name: str) -> None:
    _outermost(model).set_attn_implementation(name)


def _outermost(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None:
        raise SparseRLError(f"{type(model).__name__} holds no transformers model; pass a Hugging Face causal LM.")
    return outermost
