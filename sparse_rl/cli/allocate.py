"""`sparse-rl allocate`: choose how many slots each layer keeps, at equal memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, require_int
from .options import Dtype, InheritedBudget, InheritedInterval, ModelName, Trust
from .rollout import compressor_options


def allocate(
    context: typer.Context,
    model: ModelName,
    task: Annotated[
        str | None, typer.Option(help="The task whose prompts are used; a name from `sparse-rl list tasks`.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Instead of --task, a JSONL file; each line has `prompt` (text) or `tokens` (ids)."),
    ] = None,
    compressor: Annotated[
        str | None, typer.Option(help="A name from `sparse-rl list compressors`. Default: as in training, else rkv.")
    ] = None,
    budget: InheritedBudget = None,
    interval: InheritedInterval = None,
    by: Annotated[
        str,
        typer.Option(
            help="What evictions in one layer cost: nats, the log-prob that tokens lose; or mass, the attention lost."
        ),
    ] = "nats",
    least: Annotated[
        int | None,
        typer.Option(help="Slots that every layer keeps at least. Default: half of the budget, or what it needs."),
    ] = None,
    step: Annotated[
        int,
        typer.Option(help="Slots given at a time; a larger step makes more layers alike, which are evicted together."),
    ] = 1,
    count: Annotated[int, typer.Option("--trajectories", help="Dense rollouts to measure on.")] = 32,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The longest response. Default: as in training, else 256.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Save the model here with the budgets in its record. Default: only print them."),
    ] = None,
    dtype: Dtype = None,
    trust: Trust = False,
) -> None:
    """Measure what evictions cost in each layer, and give more slots to the layers that gain most from them."""
    from ..compressors import make
    from ..models import Record, encode, load_model, record_of, set_record, stop_ids
    from ..rollout import Engine, Sampling
    from ..train.allocate import choose_budgets
    from .companion import place_for, write
    from .inherit import Trained, cache_of
    from .train_compressor import read_texts

    require_int(trajectories=count, rows=rows, step=step)
    if (task is None) == (prompts is None):
        raise SparseRLError("give the prompts to measure on: either --task NAME or --prompts FILE.")
    place, trained = None if out is None else place_for(model, out), Trained.of(model)
    given = {"compressor": compressor, "budget": budget, "interval": interval}
    cache, _ = cache_of(trained, given, compressor_options(context), "rkv", trust)
    options = {key: value for key, value in cache.options.items() if key != "layer_budgets"}
    texts = read_texts(task, prompts, count, seed)
    lm, tokenizer = load_model(trained.model, dtype, seed=seed)
    ids = [text if isinstance(text, list) and isinstance(text[0], int) else encode(tokenizer, text) for text in texts]
    sampling = Sampling(max_new_tokens or trained.record.max_new_tokens or 256, stop_ids=stop_ids(lm, tokenizer))
    bound = Engine(lm, make(cache.compressor, **options), cache.budget, cache.interval, rows=1).compressor
    if not bound.has_budget:
        raise SparseRLError(f"{bound.name} has no budget to divide among layers; use another compressor.")
    done = Engine(lm, "dense", rows=rows).generate(ids, sampling=sampling, seed=seed)
    found = choose_budgets(lm, done, bound, by, least, step)
    what = "nats per token" if by == "nats" else "of the attention, summed over layers"
    typer.echo(
        f"{len(done)} dense rollouts: {bound.name} at budget {cache.budget}, interval {cache.interval} costs "
        f"{found.equal:.4f} {what} with equal budgets, {found.cost:.4f} with these (an estimate that adds layers up)"
    )
    typer.echo(f"equal budgets cost the layers: {', '.join(f'{cost:.4f}' for cost in found.by_layer)}")
    typer.echo(f"layer_budgets: {found.layers}")
    if place is None:
        return
    record = replace(
        record_of(lm) or Record(),
        compressor=cache.compressor,
        budget=cache.budget,
        interval=cache.interval if bound.evicts_response else None,
        options={**options, "layer_budgets": found.layers},
    )
    set_record(lm, record)
    write(lm, tokenizer, place, whole=True)
    typer.echo(f"written to {place}; commands that run this model use these budgets")
