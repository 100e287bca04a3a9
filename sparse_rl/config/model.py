"""The section `model` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SparseRLError, require_int
from ..keys import key
from ..learn.student import MAX_RANK
from ..models.logits import check_logits
from ..models.quantize import check_quantize


@dataclass(frozen=True)
class ModelSettings:
    name: str = key(
        "a hub id, a folder, a .gguf file, `tiny-sums` (built in), or a model with random weights: tiny:4x256, "
        "random:qwen2.5-1.5b"
    )
    dtype: str | None = key("float32, bfloat16, or float16 (the loss is scaled); null: the model's own", None)
    logits: str = key(
        "float32: logits in fp32 whatever the weights' dtype; model: logits rounded to that dtype, which adds noise",
        "float32",
    )
    gradient_checkpointing: bool | str = key(
        "true: keep one activation per layer and recompute the rest, which takes less memory and a third more time; "
        "selective: also keep the outputs of matrix products and attention, and recompute what is cheap (its speed has "
        "not been measured on a GPU yet); offload: as true, with that activation in host memory and MLPs by chunks of "
        "tokens, for long responses; auto: false, true or offload, the fastest that the memory plan has room for",
        False,
    )
    lora_rank: int = key("train low-rank adapters of this rank (needs peft); 0: train all weights", 0)
    lora_alpha: int = key("the adapters are scaled by alpha / rank", 32)
    lora_targets: list[str] = key(
        "linear layers that get adapters, by the ends of their names, such as [q_proj, v_proj]; []: all but the head "
        "and the feed-forward layers of a mixture of experts",
        [],
    )
    quantize: str | None = key(
        "4bit: the weights under the adapters take 4 bits each (needs bitsandbytes); null: not quantized", None
    )
    shard: bool = key(
        "with several processes, divide the learner's weights, gradients and moments among them (FSDP2)", False
    )

    def __post_init__(self):
        require_int(at_least=0, at_most=MAX_RANK, **{"model.lora_rank": self.lora_rank})
        if self.lora_targets and not self.lora_rank:
            raise SparseRLError(
                f"model.lora_targets names layers ({', '.join(self.lora_targets)}), but model.lora_rank is 0, so there "
                "are no adapters; set it to a rank such as 16."
            )
        check_logits(self.logits, "model.logits")
        check_quantize(self.quantize, "model.quantize")
        if self.quantize and (not self.lora_rank or self.shard):
            why = "model.shard divides the weights" if self.lora_rank else "model.lora_rank is 0"
            raise SparseRLError(
                f"model.quantize is {self.quantize}, which can only train adapters that are not divided, but {why}; "
                "set model.lora_rank above 0 and model.shard to false."
            )
        if self.gradient_checkpointing not in (True, False, "auto", "offload", "selective"):
            given = self.gradient_checkpointing
            raise SparseRLError(
                f"model.gradient_checkpointing is {given!r}; it must be true, false, selective, offload or auto."
            )
