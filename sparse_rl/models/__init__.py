"""Models: their shape, what is refused and why, loading by name, and tiny character-level models."""

from .load import (
    TEMPLATE_FILE,
    check_folder,
    encode,
    evaluating,
    load_config,
    load_model,
    no_progress_bar,
    with_lora,
)
from .shape import ModelShape, dtype_of, head_chunk, shape_config, weight_bytes
from .support import check_model, check_sliding_windows
from .tiny import tiny_tokenizer

__all__ = [
    "TEMPLATE_FILE",
    "ModelShape",
    "check_folder",
    "check_model",
    "check_sliding_windows",
    "dtype_of",
    "encode",
    "evaluating",
    "head_chunk",
    "load_config",
    "load_model",
    "no_progress_bar",
    "shape_config",
    "tiny_tokenizer",
    "weight_bytes",
    "with_lora",
]
