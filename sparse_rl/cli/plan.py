"""`sparse-rl plan`: the memory of a rollout or a training run, and time and cost of a run on many GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SparseRLError, require_int
from .options import Budget, CompressorName, Dtype, Interval, Trust, options_given, overrides, recipe_to_run

if TYPE_CHECKING:
    from ..config import Recipe
    from ..planning.training import TrainingPlan
    from ..scale.lengths import Lengths
    from ..scale.model import Forecast

# options that only have a meaning with --gpus
OF_MANY = ("steps", "price", "mean", "spread", "lengths", "link", "network", "per_node", "store", "message", "seed")
MOST_GPUS = 8  # the most that are proposed: one machine


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder, `tiny`, or a shape such as tiny:4x256 or qwen2.5-1.5b.")
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="A recipe: plan its training run. Options can change any key of it, as with `train`."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Predict time, memory and cost of a training run on this many GPUs; with rollout.pool, GPUs of the "
            "learner."
        ),
    ] = None,
    compressor: CompressorName = "rkv",
    budget: Budget = 512,
    interval: Interval = 128,
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of the longest prompt; with --gpus, of every prompt.")
    ] = 512,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--new", help="Tokens of the longest response.")
    ] = 4096,
    rows: Annotated[int, typer.Option(help="Sequences that each process decodes at a time.")] = 64,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            help="Memory of a GPU in GiB, to say what fits. Default: that of this machine's GPU; with --gpus, 139."
        ),
    ] = None,
    dtype: Dtype = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run. Default: those of the recipe, or 100.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of one GPU hour, to show the cost of the run.")] = None,
    mean: Annotated[
        float | None, typer.Option(help="Mean tokens of a response. Default: a quarter of --new, an assumption.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Standard deviation of lengths over their mean (lognormal). Default: 0.75, an assumption."),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="A run folder; use its response lengths instead of --mean and --spread.")
    ] = None,
    link: Annotated[float, typer.Option(help="GB/s between the GPUs of a node; the default is an assumption.")] = 300.0,
    network: Annotated[
        float, typer.Option(help="GB/s of each GPU between nodes; the default is an assumption.")
    ] = 40.0,
    per_node: Annotated[int, typer.Option(help="GPUs per node.")] = 8,
    store: Annotated[
        float,
        typer.Option(help="With rollout.pool: GB/s into and out of Ray's object store; the default is an assumption."),
    ] = 1.0,
    message: Annotated[
        float,
        typer.Option(
            help="With rollout.pool: milliseconds that a message costs the learner; the default is an assumption."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the response lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, in bytes and seconds.")] = False,
    trust: Trust = False,
) -> None:
    """Predict the memory of a rollout or training run, and the time and cost on many GPUs, from the config alone."""
    if gpu_memory is not None and not 0 < gpu_memory < math.inf:
        raise SparseRLError(f"--gpu-memory is {gpu_memory}; it must be a positive number of GiB.")
    memory = None if gpu_memory is None else int(gpu_memory * 2**30)
    if (model is None) == (recipe is None):
        named = next((repr(word) for word in context.args[:1] if not word.startswith("--")), None)
        alone = "" if named is None else f"{named} has no option before it; "
        raise SparseRLError(f"{alone}give either --model, to plan a rollout, or --recipe, to plan a training run.")
    given, options = options_given(context), context.params
    if gpus is not None:
        plan_many_gpus(recipe_of(context, given), options, given, memory)
        return
    if lost := [f"--{name.replace('_', '-')}" for name in OF_MANY if name in given]:
        raise SparseRLError(f"{lost[0]} only has a meaning with --gpus; add --gpus, or omit {lost[0]}.")
    memory = memory or memory_here()
    own = [] if recipe is not None else overrides(context.args)
    if recipe is not None or any(not key.startswith("compressor.") for key, _ in own):
        plan_training(recipe_of(context, given), prompt_tokens, memory, as_json)
    else:
        plan_rollout(options, memory, own)


def memory_here() -> int | None:
    """The memory of this machine's first GPU; None if there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def recipe_of(context: typer.Context, given: list[str]) -> Recipe:
    """The recipe with the given options.

    Without a recipe, one that trains all weights of the model, divided among the GPUs if there are several.
    """
    from ..config import make_recipe

    places = {"dtype": "model", "steps": "run"}
    places |= dict.fromkeys(("compressor", "budget", "interval", "max_new_tokens", "rows"), "rollout")
    options = context.params
    keys = [(f"{places[n]}.{n}", str(options[n])) for n in places if n in given] + overrides(context.args)
    if options["recipe"] is not None:
        return recipe_to_run(options["recipe"], keys, options["trust"])
    several = (options["gpus"] or 1) > 1
    plain = {
        "model": {"name": options["model"], "gradient_checkpointing": True, "shard": several},
        "task": {"name": "math"},
        "rollout": {n: options[n] for n in places if places[n] == "rollout"},
    }
    return make_recipe(plain, keys)


def plan_rollout(options: dict[str, Any], memory: int | None, own: Sequence[tuple[str, str]]) -> None:
    """Print the memory plan of a rollout. own: --compressor.KEY VALUE"""
    from ..compressors import make
    from ..config import parse_value
    from ..models import ModelShape, dtype_of, load_config, weight_bytes
    from ..planning.memory import make_plan

    chosen = {key.partition(".")[2].replace("-", "_"): parse_value(value) for key, value in own}
    config = load_config(options["model"])
    shape = ModelShape.of(config, dtype_of(options["dtype"]))
    result = make_plan(
        shape,
        make(options["compressor"], **chosen).bind(options["budget"], options["interval"]),
        rows=options["rows"],
        prompt_tokens=options["prompt_tokens"],
        new_tokens=options["max_new_tokens"],
        weight_bytes=weight_bytes(config, shape.dtype),
    )
    if options["as_json"]:
        numbers = dataclasses.asdict(result) | {"cache_bytes": result.cache_bytes, "total_bytes": result.total_bytes}
        if memory is not None:
            numbers["rows_that_fit"] = result.rows_that_fit(memory)
            numbers["dense_rows_that_fit"] = result.dense_rows_that_fit(memory)
        typer.echo(json.dumps(numbers))
        return
    typer.echo(
        f"{options['model']}, {str(shape.dtype).removeprefix('torch.')}: rollouts alone; --recipe plans training"
    )
    typer.echo(result.text(memory))
    if memory is not None and result.total_bytes > memory:
        typer.echo(result.largest_that_fits(memory))


def plan_training(recipe: Recipe, prompt_tokens: int, memory: int | None, as_json: bool) -> None:
    """Print the memory plan of a training run in one process; if it does not fit, the settings that would."""
    from ..planning.memory import size
    from ..train.fit import Fitting
    from ..train.run import plan_run
    from .plan_pool import pool_numbers, sampler_bytes

    recipe, chosen = with_choice(recipe, prompt_tokens, memory)
    result = plan_run(recipe, prompt_tokens)
    short = memory is not None and not result.fits(memory)
    if as_json:
        numbers = dataclasses.asdict(result) | {"total_bytes": result.total_bytes}
        if recipe.rollout.pool is not None:
            numbers |= pool_numbers(recipe, result)
        if memory is not None:
            numbers |= {"memory": memory, "fits": not short}
        if memory is not None and short:
            settings = Fitting(recipe, prompt_tokens, memory).alone()
            numbers["settings"] = [
                {"keys": s.keys, "gpus": s.processes, "total_bytes": s.plan.total_bytes} for s in settings
            ]
        typer.echo(json.dumps(numbers | ({"chosen": chosen} if chosen else {})))
        return
    typer.echo(f"{recipe.model.name}, {recipe.learn.method}\n{result.text(memory)}")
    if recipe.rollout.pool is not None:
        typer.echo(f"  each sampler of the pool: {size(sampler_bytes(recipe, result))}")
    for key, value in chosen.items():
        typer.echo(f"  {key} auto: {str(value).lower()}")
    if memory is not None and short:
        typer.echo(Fitting(recipe, prompt_tokens, memory).text())


def with_choice(recipe: Recipe, prompt_tokens: int, memory: int | None, gpus: int = 1) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with what a run would choose for `auto` on such a GPU (the defaults without one), and that choice."""
    from ..train.auto import auto_keys, choose
    from ..train.run import choose_for, with_values

    if not auto_keys(recipe):
        return recipe, {}
    chosen = choose(recipe, None) if memory is None else choose_for(recipe, prompt_tokens, memory, gpus)
    return with_values(recipe, chosen), chosen


def plan_many_gpus(recipe: Recipe, options: dict[str, Any], given: list[str], memory: int | None) -> None:
    """Print time, memory and cost of a training run on many GPUs; refuse a run that does not fit."""
    from ..scale.model import H200, Links, forecast, work_of
    from ..scale.pool import PoolForecast, forecast_pool
    from ..train.run import plan_run
    from .plan_pool import pool_numbers, pool_table, with_gpus_of_their_own

    gpus, prompt_tokens, price = options["gpus"], options["prompt_tokens"], options["price"]
    require_int(**{"--gpus": gpus})
    require_int(0, **{"--seed": options["seed"]})
    if price is not None and not 0 <= price < math.inf:
        raise SparseRLError(f"--price is {price}; it must be the price of one GPU hour, a number of at least 0.")
    alien = [name for name in ("store", "message") if name in given and recipe.rollout.pool is None]
    if alien:
        raise SparseRLError(f"--{alien[0]} only has a meaning with a pool; omit it, or add --rollout.pool ray.")
    links = Links(options["link"] * 1e9, options["network"] * 1e9, options["per_node"])
    links = dataclasses.replace(links, store=options["store"] * 1e9, message=options["message"] / 1e3)
    drawn = lengths_of(options, given, recipe.rollout.max_new_tokens)
    recipe, _ = with_choice(with_gpus_of_their_own(recipe), prompt_tokens, memory or H200.memory, gpus)
    predict = forecast if recipe.rollout.pool is None else forecast_pool
    found = predict(work_of(recipe, prompt_tokens), H200, links, gpus, drawn, options["seed"])
    memory = memory or H200.memory
    planned = plan_run(recipe, prompt_tokens, gpus)
    if not planned.fits(memory):
        raise SparseRLError(too_large(recipe, prompt_tokens, gpus, planned, memory))
    hours = (gpus + recipe.rollout.samplers) * found.step * recipe.run.steps / 3600  # each sampler has a GPU
    if not options["as_json"]:
        shown = planned, gpus, memory, hours, price
        pooled = isinstance(found, PoolForecast)
        typer.echo(pool_table(recipe, found, *shown) if pooled else table(recipe, found, *shown))
        return
    cost = {"gpu_hours": hours} | ({} if price is None else {"cost": hours * price})
    rate = {"tokens_per_s": found.tokens / found.step, "gpus": gpus, "steps": recipe.run.steps}
    memory_of_each = {"bytes_per_gpu": planned.total_bytes, "memory": memory, "plan": dataclasses.asdict(planned)}
    of_pool = pool_numbers(recipe, planned) if isinstance(found, PoolForecast) else {}
    typer.echo(json.dumps(dataclasses.asdict(found) | rate | cost | memory_of_each | of_pool))


def lengths_of(options: dict[str, Any], given: list[str], longest: int) -> Lengths:
    """The response lengths that the options describe: those of a run, or drawn from --mean and --spread."""
    from ..scale.lengths import SPREAD, Lengths, lengths_of_run

    chosen = [name for name in ("mean", "spread") if name in given]
    if options["lengths"] is not None:
        if chosen:
            raise SparseRLError(f"--{chosen[0]} and --lengths both set the response lengths; give one of them.")
        return lengths_of_run(Path(options["lengths"]))
    mean = options["mean"] if "mean" in given else longest / 4
    spread = options["spread"] if "spread" in given else SPREAD
    return Lengths(mean, spread)


def too_large(recipe: Recipe, prompt_tokens: int, gpus: int, planned: TrainingPlan, memory: int) -> str:
    """A sentence that says the run does not fit, and names the largest setting that does."""
    from ..planning.memory import size
    from ..train.run import plan_run

    def fits(count: int = gpus, **keys: object) -> bool:
        """Whether the run fits on `count` GPUs with other keys: `shard`, or keys of the rollout."""
        model = dataclasses.replace(recipe.model, shard=keys.pop("shard", recipe.model.shard))
        changed = dataclasses.replace(recipe, model=model, rollout=dataclasses.replace(recipe.rollout, **keys))
        return plan_run(changed, prompt_tokens, count).fits(memory)

    what = f"each of {gpus} GPUs needs {size(planned.total_bytes)} of {size(memory)}"
    if fits(rows=1):
        low, high = 1, recipe.rollout.rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(rows=middle) else (low, middle)
        return f"{what}; use at most --rows {low}."
    if gpus > 1 and not recipe.model.shard and fits(shard=True):
        return f"{what}; divide the learner among them with --model.shard true."
    larger = [count for count in (2, 4, MOST_GPUS) if count > gpus]
    enough = next((count for count in larger if fits(count, shard=True, rows=1)), None)
    if enough is not None:
        return f"{what}, even with one row; use {enough} GPUs with --model.shard true."
    adapters = "" if recipe.model.lora_rank else "adapters (--lora-rank 64), "
    return (
        f"{what}, and no number of GPUs up to {max(gpus, MOST_GPUS)} helps; "
        f"use {adapters}a smaller --micro-batch-tokens or a smaller model."
    )


def table(
    recipe: Recipe, found: Forecast, planned: TrainingPlan, gpus: int, memory: int, hours: float, price: float | None
) -> str:
    """The forecast as a table to print."""
    from ..planning.memory import aligned, size

    def share(seconds: float) -> str:
        return f"{seconds:,.1f} s ({seconds / found.step:.0%})"

    rollout, ahead = recipe.rollout, recipe.rollout.ahead
    division = "shards (FSDP2)" if recipe.model.shard else "gradients summed (DDP)"
    bounds = []
    if found.step_at_best < 0.99 * found.step:
        bounds.append(("  if communication hid behind arithmetic", f"{found.step_at_best:,.1f} s"))
    if ahead:
        bounds.append(("  if sharing the device gained nothing", f"{found.step_at_worst:,.1f} s"))
    lines = [
        ("a step", f"{found.step:,.1f} s" + (" (sampling and learning at the same time)" if ahead else "")),
        *bounds,
        ("  rollout, on the slowest", share(found.rollout)),
        ("  scoring, there", share(found.sample - found.rollout)),
        ("  exchange of records", share(found.exchange)),
        ("  update: arithmetic", share(found.update)),
        ("  update: communication", share(found.communication)),
        ("  weights to the samplers", share(found.publish)),
        ("  grading, diagnostics", share(found.rest)),
        ("idle, waiting for the slowest", f"{found.idle:.0%} of a step; {found.idle_sampling:.0%} of sampling"),
        ("response tokens", f"{found.tokens:,.0f} a step (mean {found.length:,.0f}, longest {found.longest:,.0f})"),
        ("tokens/s", f"{found.tokens / found.step:,.0f}; {found.tokens / found.step / gpus:,.0f} per GPU"),
        ("memory per GPU", f"{size(planned.total_bytes)} of {size(memory)}"),
        (f"{recipe.run.steps} steps", f"{found.step * recipe.run.steps / 3600:,.1f} h, {hours:,.0f} GPU hours"),
        *([] if price is None else [("cost", f"{hours * price:,.0f} at {price:g} per GPU hour")]),
    ]
    head = (
        f"{recipe.model.name} on {gpus} GPUs, {division if gpus > 1 else 'one process'}: "
        f"{rollout.prompts} prompts x {rollout.group_size}, up to {rollout.max_new_tokens} new tokens, "
        f"{rollout.compressor}, {rollout.rows} rows on each"
    )
    note = (
        "Measured on one H200; links, exchange and, unless --lengths is given, response lengths are assumptions: "
        "docs/scale.md."
    )
    return "\n".join([head, aligned(lines), note])
