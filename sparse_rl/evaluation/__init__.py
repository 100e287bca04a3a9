"""Evaluation: benchmarks asked on any cache, written down item by item, and compared."""

from .ask import Exam, ask
from .cache import Cache
from .results import Results
from .summary import Summary, summarize, table

__all__ = ["Cache", "Exam", "Results", "Summary", "ask", "summarize", "table"]
