"""Check what a caller asks of an engine: prompts of token ids, sample numbers, and lengths that the model supports."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import index

from torch import Tensor, nn

from ..compressors import Compressor
from ..errors import SparseRLError, require_int, shown
from ..models import ModelShape
from .sampling import Sampling


def token_list(prompt: Sequence[int] | Tensor, what: str = "a prompt") -> list[int]:
    """Token ids as a list. Anything else is refused: a round that it reaches would fail for all rows."""
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise SparseRLError(
            f"{what} is a list of token ids, not {shown(ids, 60)}; encode text with the model's tokenizer first."
        )
    tokens = []
    for token in ids:
        try:
            tokens.append(index(token))
        except TypeError:
            raise SparseRLError(
                f"{what} is a list of token ids, but entry {len(tokens)} is {shown(token, 60)}; give one flat list of "
                "whole numbers, as the model's tokenizer makes it."
            ) from None
    return tokens


def check_sampling(sampling: Sampling) -> Sampling:
    if not isinstance(sampling, Sampling):
        raise SparseRLError(f"sampling is {shown(sampling, 60)}; give a Sampling, such as Sampling(max_new_tokens=64).")
    return sampling


def check_seed(seed: int) -> None:
    """Refuse a seed that is no number: None would give everyone the same random numbers, not different ones."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise SparseRLError(f"seed is {shown(seed, 60)}; give a whole number, another one for other samples.")


def sample_numbers(samples: Sequence[Sequence[int]], prompts: int) -> list[list[int]]:
    """Which members of each prompt's group are wanted."""
    if len(samples) != prompts:
        raise SparseRLError(
            f"samples has {len(samples)} entries for {prompts} prompts; give a list of numbers for each prompt, "
            "an empty one if none is wanted."
        )
    for i, numbers in enumerate(samples):
        if not isinstance(numbers, Iterable):
            raise SparseRLError(f"samples[{i}] is {numbers!r}; give a list of sample numbers, such as [{numbers!r}].")
        for number, count in Counter(numbers).items():
            require_int(at_least=0, **{f"a number in samples[{i}]": number})
            if count > 1:
                raise SparseRLError(
                    f"samples[{i}] asks {count} times for sample {number}, which would be the same each time; name it "
                    "once."
                )
    return [list(numbers) for numbers in samples]


def check_prompts(
    prompts: list[list[int]], new: int, shape: ModelShape, compressor: Compressor, model: nn.Module
) -> None:
    """Refuse prompts that the model or the compressor cannot take if `new` tokens may follow each."""
    room = new + compressor.extra_positions(model, new)  # positions after the prompt
    for i, prompt in enumerate(prompts):
        _check_prompt(i, prompt, new, room, shape)
        compressor.check_prompt(len(prompt))
    longest = max(map(len, prompts), default=0)
    if longest + room > shape.context:
        warnings.warn(
            f"{longest} prompt tokens and {room} new ones go beyond the {shape.context} positions "
            "this model was made for.",
            stacklevel=4,
        )


def _check_prompt(i: int, prompt: list[int], new: int, room: int, shape: ModelShape) -> None:
    if not prompt:
        raise SparseRLError(f"prompt {i} is empty; give at least one token, such as the beginning-of-sequence token.")
    if min(prompt) < 0 or max(prompt) >= shape.vocabulary:
        outside = min(prompt) if min(prompt) < 0 else max(prompt)
        raise SparseRLError(
            f"prompt {i} holds token id {outside}, outside the vocabulary of {shape.vocabulary}; "
            "was it made with another tokenizer?"
        )
    if len(prompt) > shape.context:
        raise SparseRLError(
            f"prompt {i} has {len(prompt)} tokens, beyond the model's context of {shape.context}; "
            f"shorten it by {len(prompt) - shape.context}."
        )
    limit = shape.hard_context
    if limit is not None and len(prompt) + room > limit:
        raise SparseRLError(
            f"prompt {i} has {len(prompt)} tokens and {room} new ones may follow, but this model cannot go beyond "
            f"{limit} positions (its position table ends there, its attention changes there, or its RoPE rescales and "
            f"would falsify keys already cached); set max_new_tokens to at most {(limit - len(prompt)) * new // room}."
        )


def check_conversations(max_tokens: int, shape: ModelShape, compressor: Compressor) -> None:
    """Refuse models and compressors whose conversations cannot continue after a stop, or not up to `max_tokens`."""
    if compressor.folds:
        raise SparseRLError(
            f"{compressor.name} folds chunks of a response into beacons, which given tokens would cut; "
            "open the engine with another compressor."
        )
    if not all(state.continues for state in shape.states):
        raise SparseRLError(
            f"the recurrent layers of {shape.architecture} can only read tokens as a whole prompt, so a conversation "
            "cannot continue; use generate."
        )
    limit = shape.hard_context
    if limit is not None and max_tokens > limit:
        raise SparseRLError(
            f"max_tokens is {max_tokens}, but this model cannot go beyond {limit} positions (its position table ends "
            "there, or its RoPE rescales and would falsify keys already cached); set it to at most that."
        )
