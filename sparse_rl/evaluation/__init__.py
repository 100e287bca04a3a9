"""Evaluation: run benchmarks on any cache, write the results item by item, and compare them."""

from .ask import Exam, ask
from .cache import Cache
from .results import Results
from .summary import Summary, summarize, table

__all__ = ["Cache", "Exam", "Results", "Summary", "ask", "summarize", "table"]
