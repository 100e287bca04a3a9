"""Load configs, models and tokenizers by name: a hub id, a folder, a GGUF file, the built-in model, a character-level
model of any size, or a public architecture with random weights. Also evaluation mode and encoding prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..beacon import load_beacon
from ..errors import OutOfMemory, SparseRLError, nearest, shown
from ..files import first_line, is_text
from .adapters import base_of, is_adapter
from .companion import load_companions
from .folder import check_layers, check_size, check_tensors, reading
from .logits import check_logits, set_logits
from .names import BUILT_IN, check_folder, file_on_hub, needs_hub
from .quantize import check_quantize, quantise
from .record import Record, find_model, read_record, set_record
from .shape import SHAPES, dtype_of, shape_config
from .stops import repair
from .tiny import is_tiny, tiny_config, tiny_size, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_config(name: str):
    """The config of a hub id, a folder, a config file, or a named shape such as qwen2.5-1.5b; reads no weights."""
    from transformers import AutoConfig

    if is_tiny(name):
        return tiny_config(*tiny_size(name))
    name = str(BUILT_IN[name]) if name in BUILT_IN else find_model(name.removeprefix("random:"))
    check_folder(name, ("tiny", *BUILT_IN, *SHAPES))
    known = name.lower().split("/")[-1].removesuffix("-instruct")
    if known in SHAPES and not Path(name).exists():  # a public model's shape is known without a download
        return shape_config(known)
    source, options = source_of(name)
    with reading(name, nearest(name, ["tiny", *SHAPES])):
        check_layers(source)
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def load_model(
    name: str,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    logits: str | None = None,
    quantize: str | None = None,
):
    """(model in eval mode, tokenizer).

    `tiny-sums` is built in and can add a little; `tiny` is the same model with random weights made from `seed`;
    `tiny:4x256` has another size (layers x width); `random:SHAPE` is a public architecture with random weights and the
    tiny tokenizer, to measure speed and memory. A run folder stands for its newest checkpoint. `logits`: `float32`
    whatever the weights' dtype, or `model` for that dtype; None: as in training, else `float32`. `quantize`: `4bit`,
    which needs bitsandbytes; adapters that were trained so are loaded so.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = dtype_of(dtype)
    if logits is not None:
        check_logits(logits)
    check_quantize(quantize, "quantize")
    if is_tiny(name) or name.startswith("random:"):
        config = load_config(name.removeprefix("random:"))
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=chosen or config.dtype)
        tokenizer = tiny_tokenizer()
        if model.generation_config.eos_token_id is not None:  # the default of a shape is an id of another tokenizer
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        if quantize:
            quantise(model, device)
        return set_logits(model.eval(), logits or "float32"), tokenizer
    if name.lower() in SHAPES:
        raise SparseRLError(
            f"{name} is a shape without weights, for `sparse-rl plan`; give a hub id, a folder or random:{name}."
        )
    name = str(BUILT_IN[name]) if name in BUILT_IN else find_model(name)
    check_folder(name)
    source, options = source_of(name)
    if needs_hub(source):
        file_on_hub(source, "config.json")  # one request; the tokenizer would make several
    with reading(name):
        check_layers(source)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        if is_adapter(source):
            return _load_adapters(source, tokenizer, dtype, device, logits, quantize)
        if not options:
            check_size(source)
        if options and hasattr(transformers, "GgufConfig"):  # a transformers without it always unpacks the weights
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=chosen or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_tensors` refuses and names them
            trust_remote_code=False,
            **options,
        )
        model, info = loaded
        check_tensors(name, info)
    if options:
        _forget_quantisation(model)
    if (record := read_record(source)) is not None:
        set_record(model, record)
    repair(model, tokenizer)
    with _fitting(name, device):
        if quantize:
            quantise(model, device)
        load_companions(source, model)
        whole = cast(nn.Module, load_beacon(source, model))  # the stubs of transformers hide Module.to
        whole.to(device)
    return set_logits(whole.eval(), logits or (record or Record()).logits), tokenizer


@contextmanager
def _fitting(name: str, device: str) -> Iterator[None]:
    """Turn running out of the device's memory into a sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights of {name} do not fit on {device} ({first_line(error)}); free its memory, or use a "
            "smaller model."
        ) from error


def _load_adapters(folder: str, tokenizer, dtype: str | None, device: str, logits: str | None, quantize: str | None):
    """The base with adapters in its layers, and their tokenizer."""
    name, seed = base_of(folder)
    record = read_record(folder) or Record()
    base, _ = load_model(name, dtype, device, seed, logits or record.logits, quantize or record.quantize)
    with _fitting(folder, device):
        check_tensors(folder, vars(cast("PreTrainedModel", base).load_adapter(folder)))
    set_record(base, record)
    load_companions(folder, base)
    repair(base, tokenizer)
    return base.eval(), tokenizer


def source_of(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub id that transformers reads, and its options for a GGUF file."""
    if not name.endswith(".gguf"):
        return name, {}
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SparseRLError(f"{name} is a GGUF file, which needs gguf: pip install 'sparse-rl[gguf]'.") from error
    return str(Path(name).parent), {"gguf_file": Path(name).name}


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Mark the unpacked weights of a GGUF file as ordinary; otherwise transformers would refuse to save them."""
    model.hf_quantizer = None  # pyright: ignore[reportArgumentType]
    model.is_quantized = False  # pyright: ignore[reportArgumentType]
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")


@contextmanager
def evaluating(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Put a model into eval mode (no dropout, no gradient checkpointing), and afterwards every module back into its
    own. modules: those of the model, where they are known
    """
    training = [module for module in (model.modules() if modules is None else modules) if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def encode(tokenizer, text: str | list[dict]) -> list[int]:
    """Token ids of a prompt: text as it is, or chat messages through the tokenizer's template."""
    for content in [text] if isinstance(text, str) else [message.get("content") for message in text]:
        if isinstance(content, str) and not is_text(content):
            raise SparseRLError(
                f"a prompt holds half of a surrogate pair, which is not text: {shown(content)}; repair or remove it."
            )
    if isinstance(text, str):
        return tokenizer.encode(text)
    if tokenizer.chat_template is None:
        raise SparseRLError(
            "the prompts are chat messages, but this tokenizer has no chat template; use prompts of plain text."
        )
    return tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
