"""Models: shapes, loading by name, what is refused and why, records of training, logits, stop ids, tiny models."""

from .adapters import base_of, is_adapter, record_base, set_base
from .companion import (
    Companion,
    companions_of,
    copy_companions,
    load_companions,
    save_companions,
    set_companion,
)
from .decoder import causal_lm_of, decoder_of, decoder_place, last_logits_only, taken_by
from .folder import no_progress_bar, reading
from .layers import num_slot_heads, num_slot_layers
from .load import (
    encode,
    evaluating,
    load_config,
    load_model,
)
from .logits import Float32Head, check_logits, set_logits, wide_product
from .lora import adapted_layers, with_lora
from .merge import load_merged
from .names import check_folder
from .quantize import check_quantize, dequantise, quantised_bytes
from .record import Record, find_model, read_record, record_of, set_record
from .reward import RewardModel, load_reward_model, reward_config
from .shape import MLP_CHUNK, ModelShape, dtype_of, head_chunk, shape_config, weight_bytes
from .states import is_recurrent, recurrent_kernels
from .stops import end_token, ends_of, own_stop_ids, stop_ids
from .support import check_model, check_sliding_windows
from .tiny import tiny_tokenizer, unknown_to_tiny

__all__ = [
    "MLP_CHUNK",
    "Companion",
    "Float32Head",
    "ModelShape",
    "Record",
    "RewardModel",
    "adapted_layers",
    "base_of",
    "causal_lm_of",
    "check_folder",
    "check_logits",
    "check_model",
    "check_quantize",
    "check_sliding_windows",
    "companions_of",
    "copy_companions",
    "decoder_of",
    "decoder_place",
    "dequantise",
    "dtype_of",
    "encode",
    "end_token",
    "ends_of",
    "evaluating",
    "find_model",
    "head_chunk",
    "is_adapter",
    "is_recurrent",
    "last_logits_only",
    "load_companions",
    "load_config",
    "load_merged",
    "load_model",
    "load_reward_model",
    "no_progress_bar",
    "num_slot_heads",
    "num_slot_layers",
    "own_stop_ids",
    "quantised_bytes",
    "read_record",
    "reading",
    "record_base",
    "record_of",
    "recurrent_kernels",
    "reward_config",
    "save_companions",
    "set_base",
    "set_companion",
    "set_logits",
    "set_record",
    "shape_config",
    "stop_ids",
    "taken_by",
    "tiny_tokenizer",
    "unknown_to_tiny",
    "weight_bytes",
    "wide_product",
    "with_lora",
]
