"""A task provides prompts and rewards completions. Two methods define a task; the rest follows.

    class Task:
        def __getitem__(self, i: int) -> Prompt: ...             # the i-th prompt, the same every time
        def reward(self, prompt: Prompt, text: str) -> float: ...

A third one lets it answer:

        def reply(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None: ...

A reward is any finite number, or several named ones such as {"correct": 1, "brief": 0.5}, which are weighted and added.
A completion is right, which is what accuracy counts, if its reward is at least 1, or as the task's `right` says.

Generated tasks make prompt i from (seed, split, i) alone: nothing is stored, a run can resume at any position, and
held-out prompts come from a split of their own. Finite tasks (those with `__len__`) are visited in a new random order
every epoch.

Nothing here imports torch, so that a grading process (verify.py) starts fast.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from ..errors import SparseRLError, check_count, nearest
from ..files import VERIFIERS, names_python_file
from .conversing import call_tools
from .judging import graded, judged
from .problem import Grade, Message, Prompt
from .verify import Limits, Pool, pool_for

TaskType = TypeVar("TaskType", bound="Task")

TASKS: dict[str, type[Task]] = {}
FAR = 1_000_000_000  # the first held-out prompt of an endless task without splits


class Task:
    name: str = ""
    seed: int = 0
    isolated: bool = False  # grade in child processes
    keeps_spare: ClassVar[bool] = False  # answers may take forever: child processes are replaced at once
    grading_limits: ClassVar[Limits] = Limits()  # of the child processes
    skipped: Mapping[str, int] = MappingProxyType({})  # reason -> rows of the data that could not be used
    skipped_rows: Sequence[str] = ()  # the first few of them
    duplicates: int = 0  # rows of the data that repeat an earlier prompt; they are kept
    reward_weights: Mapping[str, float] = MappingProxyType({})  # of named rewards; one that is not here weighs 1
    template: str | None = None  # the prompts' template, a name in TEMPLATES; None: prompts have a form of their own
    way_to_solutions = "use another task, or define solution(prompt) in a class of your own"
    last_error: str | None = None  # the first error in a reward or a reply, for the caller to show once
    waited: float = 0.0  # seconds in which no row could run, because all conversations waited for replies
    tools: Sequence[Any] = ()  # typed functions that the model may call; `reply` runs its calls

    _made: tuple[str, dict] | None = None  # name and options, if `make` made it
    _pool: Pool | None = None
    _held_out: bool = False

    def __getitem__(self, i: int) -> Prompt:
        raise NotImplementedError

    def reward(self, prompt: Prompt, text: str) -> float | Mapping[str, float]:
        """What a completion is worth: a number, or named numbers, which are weighted and added."""
        raise NotImplementedError

    def right(self, reward: float, parts: Mapping[str, float]) -> bool:
        """Whether a completion counts as right. parts: the named rewards, before weights; empty if there are none."""
        return reward >= 1

    def reply(self, prompt: Prompt, messages: list[Message]) -> Any:
        """What the model reads next: messages, or None where the conversation ends. It may be a coroutine.

        messages: the prompt, as a user's message if it is plain text, and all that followed; the last one is the
        model's. Its `tool_calls` are run here by default.
        """
        return call_tools(self.tools, messages)

    @property
    def converses(self) -> bool:
        return bool(self.tools) or type(self).reply is not Task.reply

    def service(self) -> Any:
        """What replies instead of `reply`, and grades conversations as a whole (environment.py); None: nothing does."""
        return None

    def transcript(self, messages: list[Message]) -> str:
        """What of a conversation is graded: by default what the model wrote last."""
        return messages[-1]["content"]

    def judge(self, prompt: Prompt, text: str) -> Grade:
        """Reward and verdict. Override it if the verdict does not follow from the reward."""
        return graded(self, self.reward(prompt, text))

    def extracted(self, text: str) -> str | None:
        """The answer that a completion gives, to be shown; None if it gives none."""
        return final_answer(text)

    def solution(self, prompt: Prompt) -> str | list[Message]:
        """A worked solution that earns the full reward, for warm-up. Of a conversation: its messages."""
        raise SparseRLError(
            f"the task {self.name} has no worked solutions to warm a model up on; {self.way_to_solutions}."
        )

    def span(self) -> tuple[int, int | None]:
        """The first prompt that `sample` visits, and how many (None: endless). A finite task holds out a tenth."""
        if not isinstance(self, Sized):
            return (FAR if self._held_out else 0), None
        count = len(self)
        kept = max(1, count // 10) if count > 1 else 0
        return (count - kept, kept) if self._held_out else (0, count - kept)

    @property
    def members(self) -> Sequence[Task]:
        """The tasks that its prompts belong to: itself, or those of a mixture."""
        return [self]

    def of(self, prompt: Prompt) -> Task:
        """The member that a prompt belongs to."""
        return self

    def positions_of_all(self, start: int) -> int:
        """Positions from `start` on among which every prompt of a finite task is; 0: the task is endless."""
        size = self.num_prompts or 0
        return size + -start % size if size else 0

    @property
    def full_name(self) -> str:
        """The name from which `make` makes it anywhere: of a file its full path."""
        return self._made[0] if self._made else self.name

    @property
    def num_prompts(self) -> int | None:
        """How many prompts an epoch has; None: the task is endless."""
        return self.span()[1]

    def sample(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts from position `start` on: in order, or, if the task is finite, shuffled anew every epoch."""
        first, size = self.span()
        if size == 0:
            raise SparseRLError(f"the task {self.name} has no prompts; give it at least 1.")
        check_count("prompts", count)
        positions = range(start, start + count)
        places = positions if size is None else (shuffled(self.seed, p // size, size)[p % size] for p in positions)
        prompts = [self._prompt(first + place) for place in places]
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise SparseRLError(f"the task {self.name} gave {prompt!r:.80}; its [i] must return a Prompt.")
        return prompts

    def _prompt(self, i: int) -> Prompt:
        try:
            return self[i]
        except Exception as error:
            if isinstance(error, SparseRLError):
                raise
            raise SparseRLError(
                f"the task {self.name} could not make prompt {i} ({type(error).__name__}: {error})."
            ) from error

    def held_out(self) -> Task:
        """The same task with prompts that `sample` of this one never returns."""
        if self._made is not None and "split" in _parameters(type(self)):
            name, options = self._made
            return make(name, **{**options, "split": "held-out"})
        other = copy.copy(self)
        other._held_out = True
        if other.num_prompts == 0:
            raise SparseRLError(f"the task {self.name} has too few prompts to hold one out; give it at least 2.")
        return other

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        """Grade each text as a completion of its prompt. If a reward fails, it is 0, and `last_error` says why."""
        pairs = list(zip(prompts, texts, strict=True))
        if not self.isolated:
            judgements = [judged(self, prompt, text) for prompt, text in pairs]
        elif self._pool is None:
            name = self.name or type(self).__name__
            raise SparseRLError(f"the task {name} is graded in separate processes; create it with make(name, ...).")
        else:
            outcomes = self._pool.grade([(prompt, self.excerpt(text)) for prompt, text in pairs], self.effort)
            judgements = [(Grade(reward, verdict, parts), problem) for reward, verdict, parts, problem in outcomes]
        if self.last_error is None:
            self.last_error = next((problem for _, problem in judgements if problem is not None), None)
        return [grade for grade, _ in judgements]

    def start_grading(self, completions: int) -> None:
        """Start the processes that will grade so many completions, which takes seconds, while these are sampled."""
        if self.isolated and self._pool is not None:
            self._pool.start(completions)

    def excerpt(self, text: str) -> str:
        """The part of a completion that `judge` needs; only this is sent to a grading process."""
        return text

    def effort(self, excerpt: str) -> float:
        """How long grading looks to take: of many completions that ran out of time, the lightest are tried again."""
        return len(excerpt)

    def prepare(self) -> None:
        """Load what grading needs. A grading process calls this before its first completion."""

    def spec(self) -> tuple[str, dict]:
        """Name and options from which a grading process makes its copy of this task."""
        assert self._made is not None, "only `make` creates isolated tasks"
        return self._made

    def close(self) -> None:
        """End the grading processes. Grading again starts new ones."""
        if self._pool is not None:
            self._pool.close()


class GeneratedTask(Task):
    """An endless task whose prompts are made from random numbers."""

    def __init__(self, seed: int = 0, split: str = "train"):
        self.seed, self.split = seed, split

    def numbers(self, i: int) -> random.Random:
        """The random numbers of prompt i, the same in every process."""
        return random.Random(f"{self.name}|{self.seed}|{self.split}|{i}")

    def held_out(self) -> Task:
        if self._made is not None:
            return super().held_out()
        other = copy.copy(self)
        other.split = "held-out"
        return other


@lru_cache(maxsize=128)  # the tasks of a mixture take turns
def shuffled(seed: int, epoch: int, count: int) -> array[int]:
    """The order of an epoch."""
    order = array("q", range(count))
    random.Random(f"order|{seed}|{epoch}").shuffle(order)
    return order


def final_answer(text: str) -> str | None:
    """The answer in the last line of the form `answer: ...`, without surrounding blanks; None without such a line."""
    found = re.findall(r"answer:[ \t]*(\S[^\n]*)", text)
    return found[-1].strip() if found else None


def register(cls: type[TaskType]) -> type[TaskType]:
    TASKS[cls.name] = cls
    return cls


def make(name: str, /, **options) -> Task:
    """Make the task `name`: a built-in one, `gym:NAME`, `verifiers:NAME`, `FILE.py` or `FILE.py:CLASS`.

    Every task also takes the option `reward_weights`, for named rewards, and isolated tasks the fields of `Limits`.
    """
    name, build = _find(name)
    cls = cast(type[Task], build.func if isinstance(build, partial) else build)
    every = _of_every_task(build)
    _check_options(name, build, every, options)
    bounds = [key for key in every if key != "reward_weights"]
    limits = replace(cls.grading_limits, **{key: options[key] for key in bounds if key in options})
    try:
        task = build(**{key: value for key, value in options.items() if key not in every})
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SparseRLError):
            raise
        raise SparseRLError(f"the task {name} cannot use the options {options} ({error}).") from error
    task._made = (name, options)
    if "reward_weights" in every:
        task.reward_weights = check_weights(name, task.reward_weights) | check_weights(
            name, options.get("reward_weights", {})
        )
    if task.isolated:
        task._pool = pool_for(*task.spec(), limits)
    return task


def check_weights(name: str, weights: Any) -> dict[str, float]:
    """The weights of a task's named rewards, as numbers."""
    if not isinstance(weights, Mapping):
        raise SparseRLError(
            f"the reward_weights of the task {name} are {weights!r}; write them as {{correct: 1.0, brief: 0.2}}."
        )
    for key, value in weights.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(key, str) or not number:
            raise SparseRLError(
                f"the reward_weights of the task {name} have {key!r}: {value!r}; give each name a finite number."
            )
    return {key: float(value) for key, value in weights.items()}


def describe() -> list[tuple[str, str]]:
    """The names that `make` takes, with a description."""
    named = [
        (name, (cls.__doc__ or sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0])
        for name, cls in TASKS.items()
    ]
    return [
        *((name, line.removeprefix(f"{name}: ")) for name, line in named),
        ("gym:NAME", "a dataset of reasoning-gym, such as gym:spell_backward (pip install reasoning-gym)"),
        ("verifiers:NAME", "an environment of verifiers, such as verifiers:wordle-v1 (the extra `verifiers`)"),
        ("FILE.py", "your own: prompt(i) -> (text, answer) and reward(answer, text) -> float, or {name: float}"),
        ("FILE.py:CLASS", "your own subclass of Task"),
    ]


def _find(name: str) -> tuple[str, type[Task] | partial[Task]]:
    if name in TASKS:
        return name, TASKS[name]
    if name.startswith("gym:"):
        from .gym import Gym

        return name, partial(Gym, name.removeprefix("gym:"))
    if name.startswith(VERIFIERS):
        from .verifiers import Verifiers

        return name, partial(Verifiers, name.removeprefix(VERIFIERS))
    if names_python_file(name):
        from .user import load

        return load(name)
    raise SparseRLError(f"there is no task {name!r}; {nearest(name, [known for known, _ in describe()])}")


def _parameters(build: Callable) -> dict[str, inspect.Parameter]:
    """The options that a task's constructor takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter for name, parameter in inspect.signature(build).parameters.items() if parameter.kind in kinds
    }


def may_converse(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a built-in task, or one of a mixture, replies."""
    entries = options.get("tasks")
    if isinstance(entries, (list, tuple)):
        named = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
        return any(isinstance(e, Mapping) and may_converse(str(e.get("name")), e) for e in named)
    if name.startswith(VERIFIERS):
        return True
    return name in TASKS and (bool(TASKS[name].tools) or TASKS[name].reply is not Task.reply)


def takes_option(name: str, option: str) -> bool:
    """Whether a task has this option."""
    _, build = _find(name)
    return option in [*_parameters(build), *_of_every_task(build)]


def _of_every_task(build: type[Task] | partial[Task]) -> list[str]:
    """Options that `make` takes for a task, beside those of its constructor."""
    cls = cast(type[Task], build.func if isinstance(build, partial) else build)
    bounds = [field.name for field in fields(Limits) if cls.isolated and field.name not in _parameters(cls)]
    return [*bounds, *(["reward_weights"] if _weighs(cls) else [])]


def _weighs(cls: type[Task]) -> bool:
    """Whether `make` handles the option reward_weights, rather than the task itself, or the tasks of a mixture."""
    parameters = _parameters(cls)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "reward_weights" not in parameters and not takes_any and cls.grade is Task.grade


def _check_options(name: str, build: Callable, bounds: Sequence[str], options: dict) -> None:
    parameters = _parameters(build)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and option not in bounds and not anything:
            raise SparseRLError(f"the task {name} has no option {option!r}; {nearest(option, [*parameters, *bounds])}")
    for option, parameter in parameters.items():
        if (
            parameter.default is inspect.Parameter.empty
            and parameter.kind is not inspect.Parameter.VAR_KEYWORD
            and option not in options
        ):
            raise SparseRLError(f"the task {name} needs the option {option!r}, which has no default.")
