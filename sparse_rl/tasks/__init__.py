from . import (  # noqa: F401  (they register themselves)
    benchmarks,
    calculator,
    countdown,
    guess,
    linsys,
    math,
    mixture,
    notes,
    recall,
    stargraph,
    stories,
    sums,
)
from .base import (
    FAR,
    TASKS,
    GeneratedTask,
    Task,
    describe,
    final_answer,
    make,
    may_converse,
    register,
)
from .mixture import by_task, mean_parts
from .notices import first_texts, notices
from .problem import UNGRADED, Grade, Message, Prompt

__all__ = [
    "FAR",
    "TASKS",
    "UNGRADED",
    "GeneratedTask",
    "Grade",
    "Message",
    "Prompt",
    "Task",
    "by_task",
    "describe",
    "final_answer",
    "first_texts",
    "make",
    "may_converse",
    "mean_parts",
    "notices",
    "register",
]
