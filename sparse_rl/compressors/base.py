"""A compressor decides which slots stay. Most methods write only `score`.

A new one is a class with a name and a `score`; registering it makes it usable from Python, recipes and the command line, and
puts it under every test that runs over the registry. See docs/add-a-compressor.md.

Shapes: B rows (layers of a row count as rows of their own here), H KV heads, G query heads per KV head, S slots in use, D head dim.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest, require_int


@dataclass(frozen=True)
class CacheView:
    """What a compressor may look at: the slots of rows that are full. Slot S - 1 is the token fed last."""

    keys: Tensor  # [B, H, S, D] after RoPE
    values: Tensor | None  # [B, H, S, Dv]; None if the compressor said that it does not look at them
    feed: Tensor  # [B, H, S] feed index of each slot, ascending
    queries: Tensor | None  # [B, H * G, W, D] the last queries, oldest first; W <= what the compressor asked for
    mass: Tensor | None  # [B, H, S] attention received so far, summed over queries and over the group's heads
    streams: Tensor  # [B, H] int64: random streams, see sparse_rl.streams
    num_prompt_tokens: Tensor  # [B] tokens of the prompt
    scaling: float  # what the model multiplies q . k with
    softcap: float | None = None  # what the model bounds its logits with, if it does
    unreachable: Tensor | None = None  # [B, H, S] bool: beyond the layer's own sliding window for every query to come

    def attention_logits(self, last: int) -> Tensor:
        """fp32 logits of the last (at most) `last` queries over all slots. -> [B, H, G, W', S]"""
        queries = self.queries[:, :, -last:].float()  # [B, H * G, W', D]
        heads = self.keys.shape[1]
        count = queries.shape[2]
        queries = queries.unflatten(1, (heads, queries.shape[1] // heads)).flatten(
            2, 3
        )  # [B, H, G * W', D]: keys are not repeated
        logits = (queries @ self.keys.float().transpose(-1, -2) * self.scaling).unflatten(2, (-1, count))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.unreachable is not None:
            logits = logits.masked_fill(self.unreachable[:, :, None, None], -1e30)
        return logits


class Compressor:
    """Chooses `budget` of a full row's slots. `budget` and `interval` are set by the engine that uses it."""

    name: str = ""
    sinks: int = 0  # first slots always kept
    window: int = 0  # last slots always kept
    num_queries: int = 0  # how many of the last queries `score` reads
    uses_mass: bool = False  # whether `score` reads the accumulated attention
    uses_values: bool = True  # whether it reads the values; if not, they need not be copied
    copies: float = 3.0  # for the plan: copies of the slots it looks at, made on a GPU while it scores them
    evicts: bool = True
    folds: bool = False  # the model itself folds chunks into beacons while it decodes; nothing is chosen
    protect_prompt: bool = False

    def __init__(self, *, sinks: int | None = None, window: int | None = None, protect_prompt: bool = False):
        self.sinks = self.sinks if sinks is None else sinks
        self.window = self.window if window is None else window
        self.protect_prompt = protect_prompt
        self.budget, self.interval = 512, 128

    def keep(self, view: CacheView, budget: int) -> Tensor:
        """Slot numbers to keep, ascending (that is feed order). -> int64 [B, H, budget]"""
        raise NotImplementedError

    def capacity(self, prompt: int, new: int) -> int:
        """Slots a row needs for prompts of up to `prompt` tokens and `new` generated ones."""
        return self.budget + self.interval

    @property
    def evicts_response(self) -> bool:
        """Whether full rows are evicted; where they are not, a row has room for the whole response."""
        return self.evicts

    def evicts_prompt(self, tokens: int) -> bool:
        """Whether a prompt of that length is evicted, down to the budget, when it has been read."""
        return self.evicts and tokens >= self.capacity(0, 0)

    def rule(self) -> str:
        """What a row holds, for the plan."""
        return f"budget {self.budget} + interval {self.interval}"

    def protected(self, budget: int) -> tuple[int, int]:
        """How many first and last slots are always kept."""
        return self.sinks, self.window

    def bind(self, budget: int, interval: int) -> Compressor:
        """A copy with its dial set, after checking that there is something left to choose."""
        require_int(budget=budget, interval=interval)
        bound = copy.copy(self)
        bound.budget, bound.interval = budget, interval
        sinks, window = bound.protected(budget)
        if sinks < 0 or window < 0:
            raise SparseRLError(f"{self.name}: sinks {sinks} and window {window} must not be negative.")
        if not bound.has_room(budget):
            raise SparseRLError(
                f"{self.name}: budget {budget} must be above sinks {sinks} + window {window} = {sinks + window}, "
                f"which are always kept; raise the budget to at least {bound.smallest_budget(0)}."
            )
        return bound

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        """Whether a budget leaves something to choose beside what is always kept (and a protected prompt of that length)."""
        sinks, window = self.protected(budget)
        return budget > max(sinks, prompt) + window

    def smallest_budget(self, prompt: int) -> int:
        return next(
            budget for budget in range(1, 8 * (prompt + sum(self.protected(0))) + 64) if self.has_room(budget, prompt)
        )

    def check_prompt(self, tokens: int) -> None:
        """Refuse a prompt that leaves a compressor which protects prompts nothing to choose."""
        if self.protect_prompt and not self.has_room(self.budget, tokens):
            raise SparseRLError(
                f"{self.name} protects the prompt, but {tokens} prompt tokens + window {self.protected(self.budget)[1]} leave nothing of "
                f"budget {self.budget}; raise the budget to at least {self.smallest_budget(tokens)}, or set protect_prompt=False."
            )


class ScoreCompressor(Compressor):
    """Keeps the sinks, the window and, of the rest, the slots with the highest scores."""

    def score(self, view: CacheView) -> Tensor:
        """fp32 [B, H, S]; higher stays. Values at sinks and window do not matter."""
        raise NotImplementedError

    def keep(self, view: CacheView, budget: int) -> Tensor:
        sinks, window = self.protected(budget)
        used = view.keys.shape[2]
        slot = torch.arange(used, device=view.keys.device)
        forced = (slot < sinks) | (slot >= used - window)  # [S]
        if self.protect_prompt:
            forced = forced | (view.feed < view.num_prompt_tokens[:, None, None])  # [B, H, S]
        score = self.score(view).float()
        if view.unreachable is not None:
            score = score.masked_fill(view.unreachable, -torch.inf)
        return best(score.masked_fill(forced, torch.inf), budget)


def best(score: Tensor, budget: int) -> Tensor:
    """The slots with the `budget` highest scores, ascending; ties go to the newer slot. [B, H, S] -> [B, H, budget]"""
    newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return (score.shape[-1] - 1 - newest_first).sort(dim=-1).values


COMPRESSORS: dict[str, type[Compressor]] = {}


def register(cls: type[Compressor]) -> type[Compressor]:
    """Class decorator: make a compressor usable by its `name`."""
    if not cls.name:
        raise SparseRLError(f"{cls.__name__} needs a `name` to be registered under.")
    known = COMPRESSORS.get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise SparseRLError(
            f"the name {cls.name!r} belongs to {known.__qualname__} already; give {cls.__qualname__} another."
        )
    COMPRESSORS[cls.name] = cls
    return cls


def make(compressor: str | Compressor | type[Compressor], **options) -> Compressor:
    """A compressor from its name (`rkv`, `prompt-only:rkv`, `beacon:16`, `kvpress:KnormPress`) or class, or as given."""
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        return compressor(**options)
    if not isinstance(compressor, str):
        raise SparseRLError(f"compressor must be a name or a Compressor, not {type(compressor).__name__}.")
    kind, _, inner = compressor.partition(":")
    if kind == "kvpress" and inner:
        from .kvpress import KVPress

        return _made(KVPress, compressor, options | {"press": inner})
    if kind == "prompt-only":
        from .prompt_only import PromptOnly

        return PromptOnly(inner or "snapkv", **options)
    if kind == "beacon":
        from .beacon import Beacon

        if inner and not (inner.isascii() and inner.isdecimal()):
            raise SparseRLError(f"{compressor!r} names no chunk; write beacon:16 for a beacon after every 16 tokens.")
        if inner and "chunk" in options:
            raise SparseRLError(
                f"{compressor} has its chunk in its name, but chunk={options['chunk']} was given too; give it once."
            )
        return _made(Beacon, compressor, options | ({"chunk": int(inner)} if inner else {}))
    if compressor not in COMPRESSORS:
        raise SparseRLError(f"there is no compressor {compressor!r}; {nearest(compressor, [*COMPRESSORS, 'beacon'])}")
    return _made(COMPRESSORS[compressor], compressor, options)


def _made(cls: type[Compressor], name: str, options: dict) -> Compressor:
    known = parameters_of(cls)
    for option in options:
        if option not in known:
            raise SparseRLError(f"{name} has no parameter {option!r}; {nearest(option, known)}")
    try:
        return cls(**options)
    except TypeError as error:
        raise SparseRLError(f"{name} cannot use the parameters {options} ({error}).") from error


def parameters_of(cls: type[Compressor]) -> list[str]:
    """The names a compressor's constructor takes, its base classes' included where it passes `**options` on."""
    found = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters.values()
            found |= dict.fromkeys(
                p.name for p in parameters if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            )
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(found)
