from .load import (
    BUILT_IN,
    TEMPLATE_FILE,
    check_folder,
    encode,
    evaluating,
    load_config,
    load_model,
    no_progress_bar,
    with_lora,
)
from .logits import Float32Head, check_logits, set_logits
from .shape import DTYPES, ModelShape, dtype_of, head_chunk, shape_config, weight_bytes
from .stops import end_token, ends_of, own_stop_ids, stop_ids
from .support import check_model, check_sliding_windows, check_supported
from .tiny import TINY_HEAD, is_tiny, tiny_config, tiny_size, tiny_tokenizer

__all__ = [
    "Float32Head",
    "check_logits",
    "end_token",
    "ends_of",
    "own_stop_ids",
    "set_logits",
    "stop_ids",
    "BUILT_IN",
    "DTYPES",
    "ModelShape",
    "TEMPLATE_FILE",
    "TINY_HEAD",
    "check_folder",
    "check_model",
    "check_sliding_windows",
    "check_supported",
    "dtype_of",
    "encode",
    "evaluating",
    "head_chunk",
    "is_tiny",
    "load_config",
    "load_model",
    "no_progress_bar",
    "shape_config",
    "tiny_config",
    "tiny_size",
    "tiny_tokenizer",
    "weight_bytes",
    "with_lora",
]
