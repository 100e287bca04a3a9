from . import benchmarks, countdown, linsys, math, mixture, recall, stargraph, stories, sums  # noqa: F401  (they register themselves)
from .base import (
    FAR,
    TASKS,
    UNGRADED,
    GeneratedTask,
    Grade,
    Prompt,
    Task,
    describe,
    final_answer,
    make,
    register,
)
from .mixture import by_task, mean_parts
from .notices import first_texts, notices

__all__ = [
    "FAR",
    "TASKS",
    "UNGRADED",
    "GeneratedTask",
    "Grade",
    "Prompt",
    "Task",
    "by_task",
    "describe",
    "final_answer",
    "first_texts",
    "make",
    "mean_parts",
    "notices",
    "register",
]
