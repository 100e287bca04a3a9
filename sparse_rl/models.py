"""Models: from a hub id, a folder, a GGUF file, a named shape with random weights, or a character-level one of any size.

Also what the engine must know of a model before it runs (`ModelShape`), read from its config alone, and the refusal of
architectures whose attention a slot cache cannot stand in for.
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .beacon import beacon_of, load_beacon
from .cache import CacheShape
from .errors import SparseRLError, nearest
from .logits import check_logits, set_logits
from .stops import repair

TEMPLATE_FILE = "sparse_rl.json"  # beside adapters, which have no config to say in which template they were trained
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

# Public architectures by size: enough to plan memory or to measure speed with random weights, without a download.
# (hidden, feed-forward, layers, query heads, KV heads, head dim, vocabulary, tied embeddings, context)
_SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 131072),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, 32768),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 131072),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072),
}


def head_chunk(vocabulary: int) -> int:
    """Tokens whose logits exist at a time while learning: a thousand, or 16 MiB of fp32 where the vocabulary is small."""
    return max(1024, 2**22 // vocabulary)


@dataclass(frozen=True)
class ModelShape:
    """What a model's config says about its cache."""

    architecture: str
    layers: int
    heads: int  # KV heads
    query_heads: int
    head_dim: int
    vocabulary: int
    hidden: int
    intermediate: int
    context: int  # positions the model was made for
    hard_context: int | None  # positions that must not be exceeded: RoPE that rescales with length, or a table of learned positions
    dtype: torch.dtype

    @classmethod
    def of(cls, config, dtype: torch.dtype | None = None) -> ModelShape:
        config = config.get_text_config(decoder=True)
        check_supported(config)
        query_heads = config.num_attention_heads
        ropes = _rope_parameters(config)
        limits = [r.get("original_max_position_embeddings") or config.max_position_embeddings for r in ropes if _rescales(r)]
        if not any(ropes):
            limits.append(config.max_position_embeddings)
        return cls(
            architecture=config.model_type,
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or query_heads,
            query_heads=query_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            context=config.max_position_embeddings,
            hard_context=min(limits, default=None),
            dtype=dtype or config.dtype or torch.float32,
        )

    def cache_shape(self) -> CacheShape:
        return CacheShape(self.layers, self.heads, self.query_heads, self.head_dim, self.head_dim, self.dtype)


def _rope_parameters(config) -> list[dict]:
    """All RoPE settings of a config: one dict, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict) and "rope_type" in r]
    return nested or [rope]


def _rescales(rope: dict) -> bool:
    """Whether this RoPE turns all keys differently once the sequence is long: those already cached would then be wrong."""
    return rope.get("rope_type") in ("dynamic", "longrope")


def check_model(model: nn.Module) -> None:
    """Refuse, before anything runs, models that cannot be told where a token stands."""
    from transformers import PreTrainedModel

    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None or getattr(model, "config", None) is None:
        raise SparseRLError(f"{type(model).__name__} is not a transformers model: pass a Hugging Face causal LM.")
    if "position_ids" not in inspect.signature(outermost.forward).parameters:
        raise SparseRLError(f"{type(outermost).__name__} takes no position_ids: this architecture is not supported.")


def check_sliding_windows(config, windows: list[int | None]) -> None:
    """Refuse a model whose config has sliding windows that its attention was not told about. windows: what each layer passed."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        lost = [i for i, (kind, window) in enumerate(zip(kinds, windows, strict=False)) if kind == "sliding_attention" and window is None]
    else:
        slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        lost = list(range(len(windows))) if slides and not any(windows) else []
    if lost:
        raise SparseRLError(f"{config.model_type} has sliding windows in layers {lost} but keeps them from its attention: not supported.")


def check_supported(config) -> None:
    """Refuse what a slot cache cannot stand in for. What only shows when the model runs is refused by the attention itself."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise SparseRLError(f"{name} is an encoder-decoder; only decoder-only causal LMs are supported.")
    for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size", "hidden_size"):
        if getattr(config, key, None) is None:
            raise SparseRLError(f"{name} has no {key} in its config: this architecture is not supported.")
    if getattr(config, "use_bidirectional_attention", False):
        raise SparseRLError(f"{name} is set to bidirectional attention; a cache can only serve causal attention.")
    if getattr(config, "num_kv_shared_layers", 0):
        raise SparseRLError(f"{name} shares keys and values between layers, which a cache per layer cannot hold: not supported.")
    others = sorted(set(getattr(config, "layer_types", None) or []) - _SUPPORTED_LAYERS)
    if others:
        raise SparseRLError(
            f"{name} has layers of type {', '.join(others)}; only {' and '.join(sorted(_SUPPORTED_LAYERS))} layers have slots to evict."
        )


def check_folder(name: str) -> None:
    """Refuse at once, without asking the hub, a name that can only be a folder or file of ours and is not there."""
    first, *rest = name.split("/")
    if rest and first in ("", ".", "..", "~", "models", "runs") and not Path(name).exists():
        raise SparseRLError(f"there is no model in {name}; make it first (a recipe's first lines say how), or give a hub id.")


def load_config(name: str):
    """The config of a hub id, a folder, a config file, or a named shape such as qwen2.5-1.5b or tiny:4x256. Weights are not touched."""
    from transformers import AutoConfig

    if is_tiny(name):
        return tiny_config(*tiny_size(name))
    name = str(BUILT_IN[name]) if name in BUILT_IN else name.removeprefix("random:")
    check_folder(name)
    known = name.lower().split("/")[-1].removesuffix("-instruct")
    if known in _SHAPES and not Path(name).exists():  # a public model's shape is known without a download
        return shape_config(known)
    try:
        if name.endswith(".gguf"):
            return AutoConfig.from_pretrained(Path(name).parent, gguf_file=Path(name).name)
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise SparseRLError(f"no model {name!r} on disk or hub ({why}); {nearest(name, ['tiny', *_SHAPES])}") from error


def shape_config(name: str):
    """A public architecture's config, bf16."""
    from transformers import AutoConfig

    kind, hidden, intermediate, layers, query_heads, heads, head_dim, vocabulary, tied, context = _SHAPES[name]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        dtype="bfloat16",
    )


def weight_bytes(config, dtype: torch.dtype | None = None) -> int:
    """Bytes of a model's parameters, counted on a skeleton without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in skeleton.parameters()) * (dtype or config.dtype or torch.float32).itemsize


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers reads and writes without drawing."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def encode(tokenizer, text: str | list[dict]) -> list[int]:
    """Token ids of a prompt: text as it is, or chat messages through the tokenizer's template."""
    if isinstance(text, str):
        return tokenizer.encode(text)
    if tokenizer.chat_template is None:
        raise SparseRLError("the prompts are chat messages but this tokenizer has no chat template; use prompts that are plain text.")
    return tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def with_lora(model: nn.Module, rank: int, alpha: int, key: str = "model.lora_rank") -> nn.Module:
    """The model with low-rank adapters in all its linear layers; only these, and a beacon, are trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SparseRLError(f"{key} is {rank}, which needs peft: pip install 'sparse-rl[lora]'.") from error
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    if (beacon := beacon_of(adapted)) is not None:
        beacon.beacon.requires_grad_(True)
    return adapted


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout, no gradient checkpointing), given back afterwards module by module."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


TINY_HEAD = 32  # head dimension of a character-level model of chosen size


def is_tiny(name: str) -> bool:
    return name == "tiny" or name.startswith("tiny:")


def tiny_size(name: str) -> tuple[int, int, int]:
    """(layers, hidden size, query heads) of `tiny` (3, 96, 4), or of one of chosen size such as `tiny:4x256`: 4 layers, 256 wide."""
    if name == "tiny":
        return 3, 96, 4
    size = re.fullmatch(r"tiny:([1-9]\d*)x([1-9]\d*)", name)
    if size is None:
        raise SparseRLError(f"{name!r} names no size; write tiny:LAYERSxWIDTH, such as tiny:4x256 for 4 layers, 256 wide.")
    layers, hidden = map(int, size.groups())
    if hidden % (2 * TINY_HEAD):
        below = hidden - hidden % (2 * TINY_HEAD)
        raise SparseRLError(
            f"{name}: a width of {hidden} is no multiple of {2 * TINY_HEAD} (pairs of heads of {TINY_HEAD}); "
            f"use tiny:{layers}x{below or 2 * TINY_HEAD}."
        )
    return layers, hidden, hidden // TINY_HEAD


def tiny_config(layers: int = 3, hidden: int = 96, heads: int = 4):
    """A character-level Llama, two query heads to a KV head. As it stands 0.3 M parameters: small enough for a test, large enough to
    learn running sums; 4 layers of 256 have 3.0 M, 10 layers of 512 have 29 M."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=2 + len(_CHARACTERS),
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 96) * 32,  # 8/3 of the width, in multiples of 32
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        initializer_range=0.06 * (96 / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )


def tiny_tokenizer():
    """One token per printable character; 0 pads, 1 ends."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "<eos>", *_CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


BUILT_IN = {"tiny-sums": Path(__file__).parent / "assets" / "tiny-sums"}  # made by recipes/tiny-sums-warmup.yaml

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype by name; None for the model's own."""
    if name is not None and name not in DTYPES:
        raise SparseRLError(f"there is no dtype {name!r}; {nearest(name, DTYPES)}")
    return DTYPES[name] if name else None


def load_model(name: str, dtype: str | None = None, device: str | None = None, seed: int = 0, logits: str = "float32"):
    """(model in eval mode, tokenizer).

    `tiny-sums` is built in and can add a little; `tiny` is the same with random weights made from `seed`, `tiny:4x256` one of another
    size (layers x width), and `random:SHAPE` a public architecture with random weights and the tiny tokenizer, to measure speed and memory.
    `logits`: `float32`, whatever the weights' dtype, or `model`, in that dtype.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = dtype_of(dtype)
    check_logits(logits)
    if is_tiny(name) or name.startswith("random:"):
        config = load_config(name.removeprefix("random:"))
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=chosen or config.dtype)
        tokenizer = tiny_tokenizer()
        if model.generation_config.eos_token_id is not None:  # a shape's own default is an id of another tokenizer
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        return set_logits(model.eval(), logits), tokenizer
    if name.lower() in _SHAPES:
        raise SparseRLError(
            f"{name} names a shape without weights (good for `sparse-rl plan`); give a hub id or a folder, or random:{name}."
        )
    name = str(BUILT_IN[name]) if name in BUILT_IN else name
    check_folder(name)
    source, options = name, {}
    if name.endswith(".gguf"):
        source, options = str(Path(name).parent), {"gguf_file": Path(name).name}
        unpacked = getattr(transformers, "GgufConfig", None)  # where there is none, weights are always unpacked
        options |= {"quantization_config": unpacked(dequantize=True)} if unpacked else {}
    try:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen or "auto", **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **{k: v for k, v in options.items() if k == "gguf_file"})
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise SparseRLError(f"cannot load {name!r} ({why}); give a hub id, a folder, a .gguf file, or `tiny`.") from error
    if name.endswith(".gguf"):
        _forget_quantisation(model)
    if (about := Path(source) / TEMPLATE_FILE).is_file():
        model.config.sparse_rl_template = json.loads(about.read_text())["template"]
    repair(model, tokenizer)
    return set_logits(load_beacon(source, model).to(device).eval(), logits), tokenizer


def _forget_quantisation(model: nn.Module) -> None:
    """A GGUF file's weights are ordinary once they are loaded; without this, transformers would refuse to save them."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
