from . import countdown, linsys, stargraph, sums  # noqa: F401  (they register themselves)
from .base import TASKS, GeneratedTask, Task, make, register

__all__ = ["TASKS", "GeneratedTask", "Task", "make", "register"]
