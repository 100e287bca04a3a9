"""Sparse-RL: reinforcement learning of language models whose rollouts run on a compressed KV cache.

Public names are imported on first use, so that `import sparse_rl` and `sparse-rl --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers: the same names as in _MODULES
    from .cache import NEVER, SlotCache, Trace
    from .compressors import COMPRESSORS, CacheView, Compressor, ScoreCompressor, register
    from .errors import NonFiniteLogits, OutOfMemory, RolloutInterrupted, SparseRLError
    from .learn.regret import counterfactuals, give_back, regret
    from .learn.score import token_logprobs
    from .models import load_model
    from .records import Trajectory, read_trajectories
    from .rollout.engine import Engine
    from .rollout.sampling import Sampling
    from .rollout.text import generate

__version__ = "0.1.0"

__all__ = [
    "COMPRESSORS",
    "NEVER",
    "CacheView",
    "Compressor",
    "Engine",
    "NonFiniteLogits",
    "OutOfMemory",
    "RolloutInterrupted",
    "Sampling",
    "ScoreCompressor",
    "SlotCache",
    "SparseRLError",
    "Trace",
    "Trajectory",
    "counterfactuals",
    "generate",
    "give_back",
    "load_model",
    "read_trajectories",
    "register",
    "regret",
    "token_logprobs",
]

_MODULES = {  # public name: the module that defines it
    "COMPRESSORS": "compressors",
    "NEVER": "cache",
    "CacheView": "compressors",
    "Compressor": "compressors",
    "Engine": "rollout.engine",
    "NonFiniteLogits": "errors",
    "OutOfMemory": "errors",
    "RolloutInterrupted": "errors",
    "Sampling": "rollout.sampling",
    "ScoreCompressor": "compressors",
    "SlotCache": "cache",
    "SparseRLError": "errors",
    "Trace": "cache",
    "Trajectory": "records",
    "counterfactuals": "learn.regret",
    "generate": "rollout.text",
    "give_back": "learn.regret",
    "load_model": "models",
    "read_trajectories": "records",
    "register": "compressors",
    "regret": "learn.regret",
    "token_logprobs": "learn.score",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'sparse_rl' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
