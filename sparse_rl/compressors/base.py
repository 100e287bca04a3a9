"""Compressors decide which slots stay at an eviction. Most of them only define `score`.

A new one is a class with a name and a `score`. Once registered, it can be used from Python, recipes and the command
line, and every test that runs over the registry covers it. See docs/add-a-compressor.md.

Shapes: B rows (each layer of a row counts as a row here), H KV heads, G query heads per KV head, S slots in use,
D head dim.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..cache import SlotFormat
from ..cache.formats import PLAIN, slot_format
from ..errors import SparseRLError, nearest, require_int
from ..files import names_python_file
from .budgets import as_budgets, check_mean, said
from .mistakes import failed, is_own, named, place
from .view import CacheView


class Compressor:
    """Chooses `budget` of a full row's slots. The engine that uses a compressor sets its `budget` and `interval`."""

    name: str = ""
    usage: str = ""  # how the name is written where it needs an argument, such as beacon:N; "": the name alone
    sinks: int = 0  # first slots always kept
    window: int = 0  # last slots always kept
    num_queries: int = 0  # how many of the last queries `score` reads
    uses_mass: bool = False  # whether `score` reads the accumulated attention
    uses_values: bool = True  # whether it reads the values; if not, they need not be copied
    copies: float = 3.0  # for the plan: copies of the slots it looks at, made on a GPU while it scores them
    slots: SlotFormat | None = None  # how keys and values are stored; None: in the model's dtype
    layer_budgets: tuple[int, ...] = ()  # slots that each layer keeps, if not all keep `budget`, which is their mean
    protect_prompt: bool = False
    protect_given: int = 0  # in a conversation, tokens of the last so many replies stay before others
    forget_given: int = 0  # tokens of replies that are so many replies old, or older, go before others; 0: they do not
    prompt_chunk: int = 0  # tokens after which a prompt that will be evicted is evicted while it is read; 0: only then

    evicts: bool = True  # whether tokens leave the cache, because they were not chosen or because they were folded
    has_budget: bool = True  # whether it chooses slots to keep, so that a budget has a meaning
    evicts_response: bool = True  # whether full rows are evicted; if not, a row has room for the whole response
    folds: bool = False  # whether the model folds chunks of its response into one entry each while it decodes
    chooses: bool = False  # whether it folds where its policy chose to
    learns: str = ""  # the file beside a model, NAME.safetensors, that it reads (models/companion.py)

    def __init__(
        self,
        *,
        sinks: int | None = None,
        window: int | None = None,
        protect_prompt: bool = False,
        prompt_chunk: int = 0,
        protect_given: int = 0,
        forget_given: int = 0,
    ):
        require_int(at_least=0, prompt_chunk=prompt_chunk, protect_given=protect_given, forget_given=forget_given)
        if (protect_given or forget_given) and not self.evicts_response:
            raise SparseRLError(
                f"{self.name}: protect_given is {protect_given} and forget_given {forget_given}, but nothing after the "
                "prompt is evicted; set both to 0."
            )
        if forget_given and protect_given > forget_given:
            raise SparseRLError(
                f"{self.name}: protect_given {protect_given} would keep replies that forget_given {forget_given} "
                f"evicts first; set protect_given to at most {forget_given}."
            )
        if prompt_chunk and (protect_prompt or not self.has_budget):
            raise SparseRLError(
                f"{self.name}: prompt_chunk is {prompt_chunk}, but nothing of a prompt is evicted; set it to 0, or use "
                "a compressor that evicts prompts, with protect_prompt=False."
            )
        self.sinks = self.sinks if sinks is None else sinks
        self.window = self.window if window is None else window
        self.protect_prompt, self.prompt_chunk = protect_prompt, prompt_chunk
        self.protect_given, self.forget_given = protect_given, forget_given
        self.budget, self.interval = 512, 128

    @classmethod
    def parse(cls, argument: str | None, /, **options) -> Compressor:
        """A compressor from what follows its name and a colon (None: no colon does) and from its options."""
        if argument is not None:
            raise SparseRLError(f"{cls.name} takes no argument, but {cls.name}:{argument} was given; write {cls.name}.")
        return cls.from_options(cls.name, options)

    @classmethod
    def from_options(cls, written: str, options: dict[str, Any]) -> Self:
        """A compressor from its constructor's arguments, after checking their names; `written`: the name it goes by."""
        known = parameters_of(cls)
        for option in options:
            if option not in known:
                raise SparseRLError(f"{written} has no parameter {option!r}; {nearest(option, known)}")
        try:
            return cls(**options)
        except TypeError as error:
            raise SparseRLError(f"{written} cannot use the parameters {options} ({error}).") from error
        except Exception as error:
            if isinstance(error, SparseRLError) or not is_own(cls):
                raise
            raise SparseRLError(
                f"{written}{place(cls, error)} cannot be made with the parameters {options}: "
                f"{type(error).__name__}: {error}."
            ) from error

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that this compressor cannot run on."""

    def attach(self, model: nn.Module) -> None:
        """Take what it reads of a model; called once, by the engine that runs on it."""

    def extra_positions(self, model: nn.Module, new: int) -> int:
        """Positions taken up by what a row is fed beside its prompt and `new` tokens."""
        return 0

    def keep(self, view: CacheView, budget: int) -> Tensor:
        """Slot numbers to keep, ascending (that is feed order). -> int64 [B, H, budget]"""
        raise NotImplementedError

    @property
    def uses_given(self) -> bool:
        """Whether it looks at who wrote a slot's token (`CacheView.given_age`)."""
        return self.protect_given > 0 or self.forget_given > 0

    def in_order(self, score: Tensor, view: CacheView) -> Tensor:
        """Scores by which given tokens stay before others, or go before others, as the options say. fp32 [B, H, S]

        Inside each part the order is that of the scores.
        """
        age = view.given_age
        if age is None or not self.uses_given:
            return score
        part = ((age >= 0) & (age < self.protect_given)).long()
        if self.forget_given:
            part -= (age >= self.forget_given).long()
        rank = score.argsort(dim=-1, stable=True).argsort(dim=-1)  # exact in fp32
        return (rank + part * score.shape[-1]).float()

    def decides(self) -> Compressor:
        """The compressor whose code chooses the slots: this one, or the one that it asks."""
        return self

    def capacity(self, prompt: int, new: int) -> int:
        """Slots a row needs for prompts of up to `prompt` tokens and `new` generated ones, in its smallest layer."""
        return self.least_budget + self.interval

    def evicts_prompt(self, tokens: int) -> bool:
        """Whether a prompt of that length is evicted, down to the budget, when it has been read."""
        return self.has_budget and tokens >= self.capacity(0, 0)

    def scratch_capacity(self, prompt: int) -> int:
        """Slots of the row in which prompts of up to `prompt` tokens are read."""
        if not (self.prompt_chunk and self.evicts_prompt(prompt)):
            return prompt
        return min(prompt, max(self.least_budget + self.prompt_chunk, self.capacity(0, 0)))

    def rule(self) -> str:
        """What a row holds, for the plan."""
        return f"budget {said(self.budget, self.layer_budgets)} + interval {self.interval}"

    @property
    def least_budget(self) -> int:
        """Slots that the layer with the smallest budget keeps."""
        return min(self.layer_budgets, default=self.budget)

    @property
    def extra_slots(self) -> tuple[int, ...]:
        """By layer: slots that it has beyond the smallest; (): all layers have as many."""
        found = tuple(budget - self.least_budget for budget in self.layer_budgets)
        return found if any(found) else ()

    def with_extra(self, extra: int) -> Self:
        """What chooses in a layer that has so many slots beyond the smallest."""
        return self.on_average().bind(self.least_budget + extra, self.interval) if self.layer_budgets else self

    def on_average(self) -> Self:
        """The same with the mean budget in all layers."""
        plain = copy.copy(self)
        plain.layer_budgets = ()
        return plain

    @property
    def most_queries(self) -> int:
        """How many of the last queries are recorded: as many as any layer reads."""
        return max(self.with_extra(extra).num_queries for extra in set(self.extra_slots or (0,)))

    def protected(self, budget: int) -> tuple[int, int]:
        """How many first and last slots are always kept."""
        return self.sinks, self.window

    def bind(self, budget: int, interval: int) -> Self:
        """A copy with this budget and interval, after checking that there is something left to choose."""
        require_int(budget=budget, interval=interval)
        bound = copy.copy(self)
        bound.budget, bound.interval = budget, interval
        if self.layer_budgets:
            check_mean(self.layer_budgets, budget)
            bound.with_extra(0)
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
        """Whether a budget leaves something to choose beside what is always kept, a protected prompt included."""
        sinks, window = self.protected(budget)
        return budget > max(sinks, prompt) + window

    def smallest_budget(self, prompt: int) -> int:
        """The smallest budget that leaves something to choose beside a protected prompt of that length."""
        limit = 8 * (prompt + sum(self.protected(0))) + 64
        return next(budget for budget in range(1, limit) if self.has_room(budget, prompt))

    def check_prompt(self, tokens: int) -> None:
        """Refuse a protected prompt that leaves nothing to choose."""
        if self.protect_prompt and not self.has_room(self.least_budget, tokens):
            window = self.protected(self.least_budget)[1]
            raise SparseRLError(
                f"{self.name} protects the prompt, but {tokens} prompt tokens + window {window} leave nothing of "
                f"budget {self.least_budget}; raise the budget to at least {self.smallest_budget(tokens)}, "
                "or set protect_prompt=False."
            )


class ScoreCompressor(Compressor):
    """Keeps the sinks, the window and, among the rest, the slots with the highest scores."""

    def score(self, view: CacheView) -> Tensor:
        """fp32 [B, H, S]; higher stays. Values at sinks and window do not matter."""
        raise NotImplementedError

    def keep(self, view: CacheView, budget: int) -> Tensor:
        forced = self.forced(view, budget)
        raw = self._checked(self.score(view), view).float()
        score = self.in_order(raw, view)
        if view.unreachable is not None:
            score = score.masked_fill(view.unreachable, -torch.inf)
        score = score.masked_fill(forced, torch.inf)
        kept = best(score, budget)
        if is_own(type(self)):  # -1 is refused when slot numbers are checked, so that a GPU need not wait for it here
            hidden = forced if view.unreachable is None else forced | view.unreachable
            ruined = ~view.keys.isfinite().flatten(2).all(-1)  # [B, H]: the model is to blame
            blamed = raw.masked_fill(hidden, 0.0).isnan().any(-1) & ~ruined
            kept[..., 0].masked_fill_(blamed, -1)
        return kept

    def forced(self, view: CacheView, budget: int) -> Tensor:
        """Slots that stay whatever their score: sinks, window and a protected prompt. bool [S] or [B, H, S]"""
        sinks, window = self.protected(budget)
        used = view.keys.shape[2]
        slot = torch.arange(used, device=view.keys.device)
        forced = (slot < sinks) | (slot >= used - window)
        return forced | view.is_prompt if self.protect_prompt else forced

    def _checked(self, score: Any, view: CacheView) -> Tensor:
        shape = view.keys.shape[:3]
        if isinstance(score, Tensor) and score.shape == shape:
            return score
        given = f"a tensor {list(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise SparseRLError(
            f"{named(self)}.score{place(type(self))} returned {given}; it must return a tensor {list(shape)}: a score "
            "per row, KV head and slot."
        )


def choose(compressor: Compressor, view: CacheView, budget: int) -> Tensor:
    """What a compressor keeps. An error in a user's own compressor, unless of the device, becomes one sentence."""
    try:
        return compressor.keep(view, budget)
    except (SparseRLError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        decider = compressor.decides()
        if not is_own(type(decider)) or "can't allocate memory" in str(error):
            raise
        raise failed(decider, error) from error


def refusal(compressor: Compressor, used: int) -> SparseRLError:
    """What to raise where a compressor kept other slots than distinct, ascending ones below `used`."""
    decider = compressor.decides()
    cls = type(decider)
    if isinstance(decider, ScoreCompressor) and cls.keep is ScoreCompressor.keep:
        return SparseRLError(
            f"{named(decider)}.score{place(cls)} returned NaN although the keys are finite; look for 0 / 0, "
            "inf - inf, or the root or logarithm of a negative number."
        )
    return SparseRLError(
        f"{named(decider)}.keep must return distinct, ascending slot numbers below {used}{place(cls)}."
    )


def best(score: Tensor, budget: int) -> Tensor:
    """The slots with the `budget` highest scores, ascending; ties go to the newer slot. [B, H, S] -> [B, H, budget]"""
    newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return (score.shape[-1] - 1 - newest_first).sort(dim=-1).values


COMPRESSORS: dict[str, type[Compressor]] = {}

_Class = TypeVar("_Class", bound=type[Compressor])


def register(cls: _Class) -> _Class:
    """Class decorator: make a compressor usable by its `name`."""
    if not cls.name:
        raise SparseRLError(f"{cls.__name__} needs a `name` to be registered under.")
    check_flags(cls)
    known = COMPRESSORS.get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise SparseRLError(
            f"the name {cls.name!r} belongs to {known.__qualname__} already; give {cls.__qualname__} another."
        )
    COMPRESSORS[cls.name] = cls
    return cls


def check_flags(cls: type[Compressor]) -> None:
    if not cls.evicts and (cls.has_budget or cls.evicts_response):
        raise SparseRLError(
            f"{cls.__name__} has evicts = False, so it keeps every token; has_budget and evicts_response must be False "
            "too."
        )


def find(written: str) -> tuple[type[Compressor], str | None]:
    """The class that a name such as `rkv` or `kvpress:X` belongs to, and what follows the colon (None: no colon).

    `FILE.py` and `FILE.py:CLASS` run the file; nothing follows them.
    """
    name, colon, argument = written.partition(":")
    if name not in COMPRESSORS:
        if names_python_file(written):
            from .user import load

            return load(written), None
        raise SparseRLError(f"there is no compressor {written!r}; {nearest(written, COMPRESSORS)}")
    return COMPRESSORS[name], argument if colon else None


STORING = ("slots", "slots_kept", "layer_budgets")  # options that `make` takes for every compressor


def make(
    compressor: str | Compressor | type[Compressor],
    /,
    slots: str = PLAIN,
    slots_kept: Sequence[int] = (),
    layer_budgets: Sequence[int] = (),
    **options,
) -> Compressor:
    """A compressor from its name (`rkv`, `prompt-only:rkv`, `kvpress:KnormPress`, `FILE.py`) or class, or as given.

    Options of every compressor: `slots`, how keys and values are stored (`model`: in the model's dtype; `fp8`, `int8`),
    `slots_kept`, the numbers of layers that store the model's dtype all the same, and `layer_budgets`, the slots that
    each layer keeps, if not all keep the budget, which is their mean.
    """
    if isinstance(compressor, Compressor):
        return compressor
    stored, budgets = slot_format(slots, slots_kept), as_budgets(layer_budgets)
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        made = compressor(**options)
    elif isinstance(compressor, str):
        cls, argument = find(compressor)
        made = cls.parse(argument, **options)
    else:
        raise SparseRLError(f"compressor must be a name or a Compressor, not {type(compressor).__name__}.")
    if stored is not None:
        made.slots = stored
    if budgets and not made.has_budget:
        raise SparseRLError(f"{made.name} has no budget, so layer_budgets have no meaning; leave them out.")
    made.layer_budgets = budgets
    return made


def parameters_of(cls: type[Compressor]) -> list[str]:
    """The names a compressor's constructor takes, its base classes' included where it passes `**options` on."""
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            found |= dict.fromkeys(
                p.name for p in parameters if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            )
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(found)
