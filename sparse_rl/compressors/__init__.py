from . import dense, h2o, knorm, prompt_only, random, rkv, snapkv, tova, window  # noqa: F401  (they register themselves)
from .base import COMPRESSORS, CacheView, Compressor, ScoreCompressor, make, parameters_of, register

__all__ = ["COMPRESSORS", "CacheView", "Compressor", "ScoreCompressor", "make", "parameters_of", "register"]
