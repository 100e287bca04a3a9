"""FILE.py and FILE.py:CLASS: a user's own task. Child processes compute its rewards, so these may fail in any way.

The shortest task is a file with two functions:

    def prompt(i): return f"What is {i} + {i}?", 2 * i           # text (or chat messages), and what the reward needs
    def reward(answer, text): return float(text.strip().endswith(str(answer)))

`reward` may also return several named rewards, such as {"correct": 1.0, "brief": 0.5}. Optional: `REWARD_WEIGHTS`,
their weights; `right(reward, parts) -> bool`, what accuracy counts, if that is not a reward of at least 1;
`solution(answer) -> str`, a worked solution; and `SIZE`, a number or a function that returns it, for a finite task.
A task that converses has `TOOLS`, a list of typed functions that the model may call, or `reply(answer, messages)`,
which returns messages, or None at the end; it may be a coroutine. `transcript(messages) -> str` says what is graded.

A class is a subclass of `Task`; with `isolated = False`, its rewards are computed in the training process.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import SparseRLError, nearest, require_int
from ..files import python_module, split_python_file
from .base import Task
from .problem import Message, Prompt

_ARGUMENTS = {  # what each function of a file is given
    "prompt": "i",
    "reward": "answer, text",
    "right": "reward, parts",
    "solution": "answer",
    "reply": "answer, messages",
    "transcript": "messages",
}


class FunctionFile(Task):
    """An endless task made of two functions."""

    isolated = True
    way_to_solutions = "define solution(answer) in its file, or use another task"

    def __init__(self, module: ModuleType):
        assert module.__file__ is not None
        self.name, self.module = Path(module.__file__).stem, module
        self.reward_weights = getattr(module, "REWARD_WEIGHTS", {})
        self.tools = tuple(getattr(module, "TOOLS", ()))

    def __getitem__(self, i: int) -> Prompt:
        given = self.module.prompt(i)
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], (str, list)):
            raise SparseRLError(
                f"{self.module.__file__}: prompt({i}) gave {given!r:.80}; it must return (text, answer)."
            )
        return Prompt(*given, index=i)

    def reward(self, prompt: Prompt, text: str) -> float | Mapping[str, float]:
        return self.module.reward(prompt.answer, text)

    def right(self, reward: float, parts: Mapping[str, float]) -> bool:
        return self.module.right(reward, parts) if hasattr(self.module, "right") else super().right(reward, parts)

    def reply(self, prompt: Prompt, messages: list[Message]) -> Any:
        own = getattr(self.module, "reply", None)
        return super().reply(prompt, messages) if own is None else own(prompt.answer, messages)

    @property
    def converses(self) -> bool:
        return bool(self.tools) or hasattr(self.module, "reply")

    def transcript(self, messages: list[Message]) -> str:
        own = getattr(self.module, "transcript", None)
        return super().transcript(messages) if own is None else own(messages)

    def solution(self, prompt: Prompt) -> str | list[Message]:
        if not hasattr(self.module, "solution"):
            return super().solution(prompt)
        return self.module.solution(prompt.answer)


class FiniteFunctionFile(FunctionFile):
    def __init__(self, module: ModuleType):
        super().__init__(module)
        size: Any = module.SIZE() if callable(module.SIZE) else module.SIZE
        require_int(SIZE=size)
        self._size: int = size

    def __len__(self) -> int:
        return self._size


def load(name: str) -> tuple[str, type[Task] | partial[Task]]:
    """The full name of the task `FILE.py` or `FILE.py:CLASS`, and its constructor."""
    path, cls = split_python_file(name)
    module = python_module(path, "task")
    if cls:
        return f"{path}:{cls}", _class(module, cls)
    missing = [function for function in ("prompt", "reward") if not callable(getattr(module, function, None))]
    if missing:
        classes = _classes(module)
        hint = (
            f"name its class: {path.name}:{next(iter(classes))}"
            if classes
            else "define prompt(i) and reward(answer, text)"
        )
        raise SparseRLError(f"{path} has no function {missing[0]}; {hint}.")
    for function, given in _ARGUMENTS.items():
        check_takes(path, function, getattr(module, function, None), given)
    return str(path), partial(FiniteFunctionFile if hasattr(module, "SIZE") else FunctionFile, module)


def check_takes(path: Path, name: str, function: Any, given: str) -> None:
    """Refuse a function that cannot be called with what it is given, before a run calls it in other processes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is not there, or it does not say what it takes
        return
    try:
        signature.bind(*given.split(", "))
    except TypeError as error:
        raise SparseRLError(f"{path} defines {name}{signature}; it must take ({given}).") from error


def _classes(module: ModuleType) -> dict[str, type[Task]]:
    """The subclasses of Task that a file defines."""
    return {
        name: it
        for name, it in vars(module).items()
        if inspect.isclass(it) and issubclass(it, Task) and it.__module__ == module.__name__
    }


def _class(module: ModuleType, name: str) -> type[Task]:
    classes = _classes(module)
    if name not in classes:
        remedy = nearest(name, classes) if classes else "it defines no subclass of Task."
        raise SparseRLError(f"{module.__file__} has no task class {name!r}; {remedy}")
    cls = classes[name]
    if cls.__getitem__ is Task.__getitem__ or (cls.reward is Task.reward and cls.judge is Task.judge):
        raise SparseRLError(f"{module.__file__}: {name} must define __getitem__(i) and reward(prompt, text).")
    if not any("isolated" in vars(base) for base in cls.__mro__ if base is not Task):
        cls.isolated = True
    cls.name = cls.name or name
    return cls
