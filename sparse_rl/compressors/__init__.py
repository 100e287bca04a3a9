# The modules of compressors register them.
from . import (  # noqa: F401
    beacon,
    dense,
    h2o,
    knorm,
    kvpress,
    prompt_only,
    random,
    rkv,
    snapkv,
    tova,
    triattention,
    vase,
    window,
)
from .base import COMPRESSORS, CacheView, Compressor, ScoreCompressor, describe, find, make, parameters_of, register
from .beacon import default_compressor, let_choose

__all__ = [
    "COMPRESSORS",
    "CacheView",
    "Compressor",
    "ScoreCompressor",
    "default_compressor",
    "describe",
    "find",
    "let_choose",
    "make",
    "parameters_of",
    "register",
]
