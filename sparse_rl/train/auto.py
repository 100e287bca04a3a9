"""Choose the settings that a recipe leaves to the device (`auto`): micro-batch tokens and recomputed activations.

The fastest settings whose memory plan fits are chosen. Recomputing takes a third more time, while larger micro-batches
save at most a fifth (docs/performance.md). So activations are recomputed only if 16,384 tokens do not fit otherwise,
and kept in host memory only if nothing else fits. A run writes its choice to chosen.yaml and keeps it when resumed.
`selective` is never chosen, because its speed has not been measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import Recipe, read_yaml_file
from ..models import encode
from ..planning.memory import size
from ..tasks import Task

CHOSEN = "chosen.yaml"
TOKENS, CHECKPOINTING = "learn.micro_batch_tokens", "model.gradient_checkpointing"
SIZES = (65536, 32768, 16384)
SMALLER = (8192, 4096, 2048, 1024)  # tried only with recomputing
LONG = (16384, 4096, 1024)  # tried last, with the inputs of layers in host memory: even one trajectory takes too much
PROMPTS = 512  # prompts of the task that are looked at to estimate the longest


def auto_keys(recipe: Recipe) -> list[str]:
    """The keys that the recipe leaves to the device."""
    values = {TOKENS: recipe.learn.micro_batch_tokens, CHECKPOINTING: recipe.model.gradient_checkpointing}
    return [key for key, value in values.items() if value == "auto"]


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The values of these keys, with the defaults in place of `auto`."""
    checkpointing = recipe.model.gradient_checkpointing
    return {TOKENS: recipe.micro_batch_tokens, CHECKPOINTING: False if checkpointing == "auto" else checkpointing}


def choose(recipe: Recipe, fits: Callable[[Mapping[str, Any]], bool] | None) -> dict[str, Any]:
    """Values for the keys that are `auto`: the first that fit, or those that take least memory if none fit.

    fits: whether the plan with some keys fits; None: there is no GPU, so the defaults are used
    """
    keys, given = auto_keys(recipe), settings_of(recipe)
    if fits is None or not keys:
        return {key: given[key] for key in keys}
    order: list[tuple[bool | str, int]] = [(False, tokens) for tokens in SIZES]
    order += [(True, tokens) for tokens in (*SIZES, *SMALLER)]
    order += [] if recipe.model.shard else [("offload", tokens) for tokens in LONG]
    tries: list[dict[str, Any]] = []
    for recompute, tokens in order:
        values = {key: {TOKENS: tokens, CHECKPOINTING: recompute}[key] for key in keys}
        if values not in tries:
            tries.append(values)
    return next((values for values in tries if fits(values)), tries[-1])


def device_memory() -> int | None:
    """Bytes of the GPU that this process may use; None if there is none."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction())


def longest_prompt(task: Task, tokenizer) -> int:
    """Tokens of the longest of a task's first prompts."""
    prompts = task.sample(0, min(PROMPTS, task.num_prompts or PROMPTS))
    return max(len(encode(tokenizer, prompt.text)) for prompt in prompts)


def recorded(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """What a run chose earlier, for the keys that its recipe still leaves as `auto`."""
    path = folder / CHOSEN
    found = read_yaml_file(path) if path.is_file() else {}
    return {key: found[key] for key in auto_keys(recipe) if isinstance(found, dict) and key in found}


def said(chosen: Mapping[str, Any], total: int, memory: int | None) -> str:
    """The choice in a sentence. total: bytes of the plan"""
    values = ", ".join(f"{key} {str(value).lower()}" for key, value in chosen.items())
    where = "the defaults, because there is no GPU" if memory is None else f"a plan of {size(total)} of {size(memory)}"
    return f"auto: {values} ({where}); kept in {CHOSEN} for --resume."
