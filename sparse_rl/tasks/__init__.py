from . import benchmarks, countdown, linsys, math, recall, stargraph, stories, sums  # noqa: F401  (they register themselves)
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
    first_texts,
    make,
    mean_parts,
    notices,
    register,
)

__all__ = [
    "FAR",
    "TASKS",
    "UNGRADED",
    "GeneratedTask",
    "Grade",
    "Prompt",
    "Task",
    "describe",
    "final_answer",
    "first_texts",
    "make",
    "mean_parts",
    "notices",
    "register",
]
