"""Say in one sentence what to change if a warm-up runs out of memory (saving.py does so for a run)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..config import Recipe
from ..errors import OutOfMemory, any_of
from ..files import first_line
from ..planning.memory import is_out_of_memory


@contextmanager
def explained_memory(recipe: Recipe, in_pass: bool = True) -> Iterator[None]:
    """Turn running out of memory into a sentence. in_pass: in a pass through the model; otherwise for masters and
    moments, which smaller micro-batches do not make smaller
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        where = "in a pass through the model" if in_pass else "for the optimizer's state"
        remedies = any_of(*memory_remedies(recipe, in_pass))
        raise OutOfMemory(f"out of memory {where} ({first_line(error)}); {remedies}.") from error


def memory_remedies(recipe: Recipe, in_pass: bool) -> list[str]:
    """What to change if memory ran out, in words. in_pass: as in `explained_memory`"""
    rank, tokens = recipe.model.lora_rank, recipe.micro_batch_tokens
    adapters = [] if rank else ["train only adapters (model.lora_rank 16)"]
    if in_pass:
        smaller = f"lower learn.micro_batch_tokens (now {tokens}, at least one solution)"
        return [smaller, "set model.gradient_checkpointing", *adapters]
    lower = [f"lower model.lora_rank (now {rank})"] if rank else []
    return [*lower, "use a smaller model", *adapters]
