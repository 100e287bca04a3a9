"""A character-level Llama of any size, and its tokenizer, for tests, demos and studies on small machines."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from ..errors import SparseRLError

TINY_HEAD = 32  # head dimension of `tiny:LAYERSxWIDTH`
TINY_POSITIONS = 4096
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def is_tiny(name: str) -> bool:
    return name == "tiny" or name.startswith("tiny:")


def tiny_size(name: str) -> tuple[int, int, int, int]:
    """(layers, hidden size, query heads, positions): (3, 96, 4, 4096) for `tiny`, (4, 256, 8, 16384) for
    `tiny:4x256@16384`.
    """
    if name == "tiny":
        return 3, 96, 4, TINY_POSITIONS
    size = re.fullmatch(r"tiny:([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d{0,6}))?", name)
    if size is None:
        raise SparseRLError(
            f"{name!r} does not name a size; write tiny:LAYERSxWIDTH, such as tiny:4x256 for 4 layers of width 256, or "
            f"tiny:4x256@16384 for 16384 positions instead of {TINY_POSITIONS}."
        )
    layers, hidden = int(size[1]), int(size[2])
    if hidden % (2 * TINY_HEAD):
        below = hidden - hidden % (2 * TINY_HEAD)
        raise SparseRLError(
            f"{name}: the width {hidden} is not a multiple of {2 * TINY_HEAD} (two heads of {TINY_HEAD}); "
            f"use tiny:{layers}x{below or 2 * TINY_HEAD}."
        )
    return layers, hidden, hidden // TINY_HEAD, int(size[3] or TINY_POSITIONS)


def tiny_config(layers: int = 3, hidden: int = 96, heads: int = 4, positions: int = TINY_POSITIONS):
    """A character-level Llama with two query heads per KV head.

    The default has 0.3 M parameters: small enough for a test, large enough to learn running sums. 4 layers of width 256
    have 3.0 M parameters, 10 layers of width 512 have 29 M.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=2 + len(_CHARACTERS),
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 96) * 32,  # 8/3 of the width, in multiples of 32
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=positions,
        initializer_range=0.06 * (96 / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )


def tiny_tokenizer():
    """One token per printable character; token 0 pads, token 1 ends a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "<eos>", *_CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def unknown_to_tiny(tokenizer, texts: Iterable[str]) -> list[str]:
    """A line for users if a tiny tokenizer reads characters that it does not have; otherwise an empty list."""
    known, count, characters = set(_CHARACTERS), 0, {}
    if set(tokenizer.get_vocab()) != {"<pad>", "<eos>", *_CHARACTERS}:
        return []
    for text in texts:
        missing = dict.fromkeys(character for character in text if character not in known)
        count, characters = count + bool(missing), characters | missing
    if not count:
        return []
    shown = " ".join(repr(character) for character in list(characters)[:5])
    return [
        f"{count} prompts hold characters that the tiny tokenizer does not have and reads as spaces, such as {shown}"
    ]
