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
from .written_out import Replacements, check_positions, replaced, replacements, writes_out

ATTENTIONS = {"slots": slots_attention, "shadow": shadow_attention}


class Switch:
    """Switches a model to one of our attentions and back, as often as one likes: `with switch(): ...`.

    What a switch changes is looked for once, and again only if a module was replaced meanwhile. So a round of an open
    engine can make a switch without walking through the model.
    """

    def __init__(self, model: nn.Module, name: str):
        self.model, self.name = model, name
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []  # of each, when it was looked at
        self._models: list[Any] = []  # those of transformers, outer before inner
        self._methods: Replacements = []  # what modules get for the length of a switch
        self._checked = False

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model, as they are now."""
        from transformers import PreTrainedModel

        if not self._modules or [module._modules for module in self._modules] != self._children:
            self._modules = list(self.model.modules())
            self._children = [dict(module._modules) for module in self._modules]
            self._models = [module for module in self._modules if isinstance(module, PreTrainedModel)]
            self._methods, self._checked = replacements(self.model, ATTENTIONS[self.name]), False
        return self._modules

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run the model with the attention, then restore the one it had before."""
        assert self.modules
        configs = list({id(model.config): model.config for model in self._models}.values())
        before = [config._attn_implementation for config in configs]
        try:
            self._set(configs)
            with replaced(self._methods):
                yield
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation = implementation

    def _set(self, configs: list[Any]) -> None:
        """Let attention layers, which read these configs, use the attention."""
        if not self._checked:
            self._set_and_check(configs)
        elif not writes_out(self._methods):
            for config in configs:
                config._attn_implementation = self.name

    def _set_and_check(self, configs: list[Any]) -> None:
        """The same by transformers' own function, and refuse a model that does not allow it."""
        from transformers import AttentionInterface

        AttentionInterface.register(self.name, ATTENTIONS[self.name])
        if not writes_out(self._methods):
            outermost = self._outermost()
            outermost.set_attn_implementation(self.name)
            stuck = [type(config).__name__ for config in configs if config._attn_implementation != self.name]
            if stuck:
                decoder = outermost.config.get_text_config(decoder=True)
                where = "its decoder" if decoder._attn_implementation != self.name else "a part beside its decoder"
                raise SparseRLError(
                    f"{type(self.model).__name__} does not let its attention be replaced ({', '.join(stuck)}): {where} "
                    "writes it out in code of its own and does not call transformers' attention interface."
                )
        check_positions(self.model)
        self._checked = True

    def _outermost(self) -> Any:
        if not self._models:
            name = type(self.model).__name__
            raise SparseRLError(f"{name} holds no transformers model; pass a Hugging Face causal LM.")
        return self._models[0]


def use_attention(model: nn.Module, name: str) -> AbstractContextManager[None]:
    """Run `model` with the attention `name`, then restore the one it had before."""
    return Switch(model, name)()


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
