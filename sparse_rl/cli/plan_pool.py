"""The output of `sparse-rl plan` for a run with a pool of samplers (`rollout.pool`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import Recipe
    from ..planning.training import TrainingPlan
    from ..scale.pool import PoolForecast


def with_gpus_of_their_own(recipe: Recipe) -> Recipe:
    """The recipe with a pool on a cluster, where no sampler shares a GPU with the learner."""
    if recipe.rollout.pool != "ray":
        return recipe
    return replace(recipe, rollout=replace(recipe.rollout, pool="ray://auto"))


def sampler_bytes(recipe: Recipe, planned: TrainingPlan) -> int:
    """Memory of a sampler's device; a sampler that runs ahead also scores what it samples."""
    return planned.sampler_bytes(scores=bool(recipe.rollout.ahead))


def pool_numbers(recipe: Recipe, planned: TrainingPlan) -> dict[str, Any]:
    return {"samplers": recipe.rollout.samplers, "bytes_per_sampler": sampler_bytes(recipe, planned)}


def pool_table(
    recipe: Recipe,
    found: PoolForecast,
    planned: TrainingPlan,
    gpus: int,
    memory: int,
    hours: float,
    price: float | None,
) -> str:
    """The forecast as a table to print. hours: GPU hours of learner and samplers together"""
    from ..planning.memory import aligned, size

    def share(seconds: float) -> str:
        return f"{seconds:,.1f} s ({seconds / found.step:.0%})"

    rollout, ahead, steps = recipe.rollout, recipe.rollout.ahead, recipe.run.steps
    samplers, own = rollout.samplers, hours / (gpus + rollout.samplers)
    division = "one process" if gpus == 1 else "shards (FSDP2)" if recipe.model.shard else "gradients summed (DDP)"
    hidden = []
    if found.step_at_best < 0.99 * found.step:
        hidden.append(("  if communication hid behind arithmetic", f"{found.step_at_best:,.1f} s"))
    lines = [
        ("a step", f"{found.step:,.1f} s" + (" (sampling and learning at the same time)" if ahead else "")),
        *hidden,
        (f"  rollout{' and scoring' if ahead else ''}, until the last result arrives", share(found.rollout)),
        *([] if ahead else [("  scoring, on the learner", share(found.sample - found.rollout))]),
        ("  results, messages and records", share(found.exchange)),
        ("  update: arithmetic", share(found.update)),
        ("  update: communication", share(found.communication)),
        ("  weights into and out of the object store", share(found.publish)),
        ("  grading, diagnostics", share(found.rest)),
        ("idle", f"all GPUs {found.idle:.0%} of a step; samplers {found.idle_sampling:.0%} of a rollout"),
        ("messages", f"at most {found.messages:,.0f} a step; {size(int(found.received))} of results"),
        ("response tokens", f"{found.tokens:,.0f} a step (mean {found.length:,.0f}, longest {found.longest:,.0f})"),
        ("tokens/s", f"{found.tokens / found.step:,.0f}; {found.tokens / found.step / (gpus + samplers):,.0f} per GPU"),
        ("memory of a GPU of the learner", f"{size(planned.total_bytes)} of {size(memory)}"),
        ("memory of a sampler's GPU", f"{size(sampler_bytes(recipe, planned))} of {size(memory)}"),
        (f"{steps} steps", f"{found.step * steps / 3600:,.1f} h, {hours:,.0f} GPU hours"),
        ("  learner and samplers", f"{own * gpus:,.0f} and {own * samplers:,.0f} GPU hours"),
        *([] if price is None else [("cost", f"{hours * price:,.0f} at {price:g} per GPU hour")]),
    ]
    head = (
        f"{recipe.model.name}, a learner on {gpus} {'GPU' if gpus == 1 else 'GPUs'} ({division}) and {samplers} "
        f"samplers with a GPU each: {rollout.prompts} prompts x {rollout.group_size}, up to {rollout.max_new_tokens} "
        f"new tokens, {rollout.compressor}, {rollout.rows} rows on each"
    )
    note = (
        "Measured on one H200; links, object store, messages and, unless --lengths is given, response lengths are "
        "assumptions: docs/scale.md."
    )
    return "\n".join([head, aligned(lines), note])
