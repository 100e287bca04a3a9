# The modules of compressors register them.
from . import (  # noqa: F401
    beacon,
    dense,
    h2o,
    knorm,
    kvpress,
    learned,
    prompt_only,
    random,
    rkv,
    snapkv,
    tova,
    triattention,
    vase,
    window,
)
from .base import (
    COMPRESSORS,
    STORING,
    CacheView,
    Compressor,
    ScoreCompressor,
    find,
    make,
    parameters_of,
    register,
)
from .beacon import default_compressor, let_choose
from .listing import describe

__all__ = [
    "COMPRESSORS",
    "STORING",
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
