"""Adapters, added into the weights of their base: a whole model that needs neither peft nor the base."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .adapters import base_of, quiet_peft
from .companion import load_companions
from .folder import check_tensors, reading
from .load import load_model
from .quantize import dequantise
from .record import Record, read_record, set_record
from .stops import repair

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_merged(folder: str, dtype: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The whole model that a folder of adapters stands for, on the CPU, with their record; and their tokenizer. dtype:
    None: that of the base
    """
    from peft import PeftModel
    from transformers import AutoTokenizer

    name, seed = base_of(folder)
    record = read_record(folder)
    base, _ = load_model(name, dtype, device="cpu", seed=seed, quantize=(record or Record()).quantize)
    if record is not None and record.quantize:  # adapters fit the weights that they were trained on
        dequantise(base)
    with reading(folder), quiet_peft():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        adapted = cast("PeftModel", PeftModel.from_pretrained(base, folder))
        _check_adapters(folder, adapted)
        merged = adapted.merge_and_unload()
    repair(merged, tokenizer)
    set_record(merged, record)
    load_companions(folder, merged)
    return cast("PreTrainedModel", merged), tokenizer


def _check_adapters(folder: str, adapted: PeftModel) -> None:
    """Refuse adapters whose file lacks tensors. peft only warns, and merges what these begin with."""
    from peft import get_peft_model_state_dict, load_peft_weights

    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    given = load_peft_weights(folder, device="cpu").keys()
    found = {"missing_keys": wanted - given, "mismatched_keys": [], "unexpected_keys": []}  # peft warns of these
    check_tensors(folder, found)
