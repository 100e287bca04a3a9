from .engine import Engine
from .sampling import Sampling

__all__ = ["Engine", "Sampling"]
