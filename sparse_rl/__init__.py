"""Sparse-RL: reinforcement learning of language models whose rollouts run on a compressed KV cache.

Names are imported when they are first used, so that `import sparse_rl` and `sparse-rl --help` do not wait for torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_NAMES = {
    "COMPRESSORS": "compressors",
    "CacheView": "compressors",
    "Compressor": "compressors",
    "Engine": "rollout.engine",
    "NEVER": "cache",
    "NonFiniteLogits": "errors",
    "OutOfMemory": "errors",
    "RolloutInterrupted": "errors",
    "Sampling": "rollout.sampling",
    "ScoreCompressor": "compressors",
    "SlotCache": "cache",
    "SparseRLError": "errors",
    "Trace": "cache",
    "Trajectory": "records",
    "generate": "rollout.text",
    "load_model": "models",
    "read_trajectories": "records",
    "register": "compressors",
    "token_logprobs": "learn.score",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'sparse_rl' has no attribute {name!r}")
    return getattr(import_module(f".{_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
