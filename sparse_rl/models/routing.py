"""Record and replay which experts a token of a mixture of experts goes to.

A router scores all experts and takes the best k. If two scores are almost equal, rounding decides. The sampler and the
learner round differently, so the token would go through other experts and get another log-prob. So the sampler's
choices are recorded (`RouteRecorder`) and the learner repeats them (`replaying_routes`):

    sampler    I = the k best of s        weights = f(s, I)
    learner    I = the sampler's          weights = f(s, I)        s: its own scores, through which gradients flow

Replaying runs a router's own forward function, in which the only call of `topk` over all experts returns the recorded
ids and their scores. So f (a softmax before or after, sigmoids, norms, scales) is the model's own, to the bit. No class
is patched: instances get another forward function within a `with`, and hooks record.

Shapes: M layers with experts, n tokens in the order in which the model reads them, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SparseRLError
from .load import evaluating
from .shape import without_storage


@dataclass(frozen=True)
class Routing:
    """How the routers of a model choose, and the format of their records."""

    layers: int  # M: layers with experts
    experts: int  # in a layer
    chosen: int  # k: experts of a token

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of recorded ids."""
        return torch.uint8 if self.experts <= 256 else torch.uint16

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's record."""
        return self.layers * self.chosen * self.dtype.itemsize

    def check(self, routes: Tensor, tokens: int) -> None:
        """Refuse routes that do not fit this model or these tokens. routes [T, M, k]"""
        expected = (tokens, self.layers, self.chosen)
        if tuple(routes.shape) != expected:
            raise SparseRLError(
                f"the routes are for (tokens, layers with experts, experts of a token) {tuple(routes.shape)}, but this "
                f"model and these tokens have {expected}; they belong to another trajectory or another model."
            )
        highest = int(routes.long().max()) if routes.numel() else 0
        if highest >= self.experts:
            raise SparseRLError(
                f"the routes name expert {highest}, but the layers of this model have {self.experts}: they belong to "
                "another model; sample the trajectory again."
            )


def has_experts(model: nn.Module) -> bool:
    """Whether a model is a mixture of experts."""
    return any("Experts" in type(module).__name__ for module in model.modules())


def routers(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> list[Any]:
    """The routers of a model, layer by layer: modules that score all experts and choose some for each token.

    modules: those of the model, where they are known
    """
    modules = model.modules() if modules is None else modules
    return [m for m in modules if _kind(m).endswith(("Router", "Gate")) and isinstance(_top_k(m), int)]


def routing_of(model: nn.Module) -> Routing | None:
    """The routing of a model, from its routers' settings; None if it has no experts, or routers of different sizes."""
    sizes = {(getattr(router, "num_experts", None), _top_k(router)) for router in routers(model)}
    if len(sizes) != 1 or not all(isinstance(size, int) for size in next(iter(sizes))):
        return None
    experts, chosen = sizes.pop()
    assert experts is not None and chosen is not None
    return Routing(len(routers(model)), experts, chosen)


def routing_from(config: Any) -> Routing | None:
    """The routing of a model, from its config alone."""
    return routing_of(without_storage(config))


@torch.no_grad()
def why_not_replayed(model: nn.Module) -> str | None:
    """Why a model's routing cannot be replayed, as words that follow its name; None if it can be.

    Three tokens are fed. Routers must return what they chose, give the same weights when told the same choice, and
    follow another choice.
    """
    if not has_experts(model):
        return "has no experts"
    routing = routing_of(model)
    if routing is None:
        return "has no routers that choose equally many of equally many experts in every layer"
    usual = _try(model, None, routing)
    if isinstance(usual, str):
        return usual
    weights, ids = usual
    same = _try(model, ids, routing)
    others = ids.add(1).remainder(routing.experts)
    changed = _try(model, others, routing)
    if isinstance(same, str) or isinstance(changed, str):
        return same if isinstance(same, str) else str(changed)
    follows = torch.equal(same[0][0], weights[0]) and torch.equal(same[1], ids) and torch.equal(changed[1], others)
    return None if follows else f"has routers ({_kind(routers(model)[0])}) that do not follow when told what to choose"


def _try(model: nn.Module, told: Tensor | None, routing: Routing) -> str | tuple[Tensor, Tensor]:
    """Feed three tokens -> weights and ids of all routers, [M, 3, k] each, or words about what is
    unusual in a router.
    """
    outputs: list[Any] = []
    device = next(model.parameters()).device
    handles = [r.register_forward_hook(lambda _, __, output: outputs.append(output)) for r in routers(model)]
    try:
        with nullcontext() if told is None else replaying_routes(model, told), evaluating(model):
            model(input_ids=torch.arange(1, 4, device=device)[None], use_cache=False)
    except RoutingNotReplayed as error:
        return str(error)
    finally:
        for handle in handles:
            handle.remove()
    if len(outputs) != routing.layers or not all(_is_usual(output, 3, routing.chosen) for output in outputs):
        return f"has routers ({_kind(routers(model)[0])}) that do not return scores, weights and ids, once a layer"
    return torch.stack([output[1] for output in outputs]), torch.stack([output[2] for output in outputs])


def _is_usual(output: Any, tokens: int, chosen: int | None) -> bool:
    """Whether a router returned (scores, weights [n, k], ids [n, k]), as transformers' routers do."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(x, Tensor) for x in output[:3]):
        return False
    _, weights, ids, *_ = output
    return ids.dtype == torch.int64 and weights.shape == ids.shape == (tokens, chosen)


class RouteRecorder:
    """Within `with recorder:`, every forward pass of the model writes its routes into `recorder.into`, if that is set.

    The hooks are the same objects every time, so a captured graph stays valid (rollout/capture.py).
    """

    def __init__(self, model: nn.Module, routing: Routing, modules: Callable[[], Iterable[nn.Module]] | None = None):
        """modules: returns those of the model, without walking through it"""
        self.model, self.routing, self.modules = model, routing, model.modules if modules is None else modules
        self.into: Tensor | None = None  # [M, n, k], integers of any kind: the first n tokens of the next forward pass
        self._hooks: list[Callable] = [partial(self._note, layer) for layer in range(routing.layers)]
        self._handles: list[Any] = []

    def __enter__(self) -> RouteRecorder:
        found = routers(self.model, self.modules())
        assert len(found) == len(self._hooks) and not self._handles
        self._handles = [router.register_forward_hook(hook) for router, hook in zip(found, self._hooks, strict=True)]
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.into = [], None

    def empty(self, tokens: int, device: torch.device) -> Tensor:
        """Allocate `into` for a forward pass. uint8, or uint16 as int16 bits, which more operations support"""
        shape = (self.routing.layers, tokens, self.routing.chosen)
        self.into = torch.empty(shape, dtype=on_device(self.routing.dtype), device=device)
        return self.into

    def _note(self, layer: int, router: nn.Module, args: Any, output: Any) -> None:
        if self.into is not None:
            self.into[layer].copy_(output[2][: self.into.shape[1]])


def records_routes(hook: Any) -> bool:
    """Whether a hook is one of a `RouteRecorder`'s, which change nothing."""
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RouteRecorder)


def on_device(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ids are kept while tensors are still being written."""
    return torch.int16 if dtype == torch.uint16 else dtype


@contextmanager
def replaying_routes(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Within the `with`, send every token to the experts of `routes` [M, n, k]. Checkpointed layers enter it again."""
    found = routers(model)
    assert len(found) == len(routes), f"{len(found)} routers, routes of {len(routes)}"
    before = [vars(router).get("forward") for router in found]
    try:
        for router, ids in zip(found, routes, strict=True):
            vars(router)["forward"] = _Replayed(router, ids)
        yield
    finally:
        for router, forward in zip(found, before, strict=True):
            vars(router).pop("forward", None)
            if forward is not None:
                vars(router)["forward"] = forward


class RoutingNotReplayed(SparseRLError):
    """A router did not make the choice that it was told. The message continues the name of a model."""


class _Replayed:
    """A forward function for a router that makes the choice it is told."""

    def __init__(self, router: Any, ids: Tensor):
        """ids [n, k]: the experts to choose"""
        forward = router.forward  # if it is replayed already, only the later replay counts
        self.forward = forward.forward if isinstance(forward, _Replayed) else forward
        self.router, self.ids = router, ids

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Told(self.ids, self.router.num_experts) as told:
            output = self.forward(*args, **kwargs)
        if told.times != 1:
            raise RoutingNotReplayed(f"has routers ({_kind(self.router)}) that choose {told.times} times, not once")
        return output


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


class _Told(TorchFunctionMode):
    """Within it, `topk` over all experts returns the given ids."""

    def __init__(self, ids: Tensor, experts: int):
        super().__init__()
        self.ids, self.experts, self.times = ids.long(), experts, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.dim() != 2 or (scores.shape[1], k) != (self.experts, self.ids.shape[1]):  # a choice of groups
            return func(*args, **kwargs)
        if len(scores) != len(self.ids):
            raise SparseRLError(
                f"routes of {len(self.ids)} tokens were given to a forward pass of {len(scores)}; give the routes of "
                "these tokens."
            )
        self.times += 1
        return _TopK(scores.gather(1, self.ids), self.ids)


def _top_k(module: nn.Module) -> int | None:
    return getattr(module, "top_k", None)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
