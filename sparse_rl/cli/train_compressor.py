"""`sparse-rl train-compressor`: train the compressor `learned` on what evictions cost a model's own rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, require_int
from .options import Dtype, InheritedBudget, InheritedInterval, ModelName


def train_compressor(
    model: ModelName,
    task: Annotated[
        str | None, typer.Option(help="The task whose prompts are used; a name from `sparse-rl list tasks`.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Instead of --task, a JSONL file; each line has `prompt` (text) or `tokens` (ids)."),
    ] = None,
    budget: InheritedBudget = None,
    interval: InheritedInterval = None,
    protect_prompt: Annotated[bool, typer.Option("--protect-prompt", help="Never evict the prompt.")] = False,
    window: Annotated[
        int, typer.Option(help="Newest slots that are always kept; the scorer reads as many last queries.")
    ] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds, each of which samples and then learns.")] = 4,
    count: Annotated[int, typer.Option("--trajectories", help="Rollouts per round.")] = 32,
    steps: Annotated[int, typer.Option(help="Optimizer steps per round.")] = 150,
    pairs: Annotated[int, typer.Option(help="Pairs of slots compared per eviction, layer and KV head.")] = 32,
    features: Annotated[
        str,
        typer.Option(help="What the scorer reads of a slot: all, or position (place, age, whether it is a prompt's)."),
    ] = "all",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The longest response. Default: as in training, else 256.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and the first weights.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Save the model and the file here. Default: write the file beside the model."),
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Train the compressor `learned` on the model's own rollouts, and write learned.safetensors."""
    from ..compressors import make
    from ..compressors.learned import fresh
    from ..models import encode, load_model, set_companion, stop_ids
    from ..rollout import Engine, Sampling
    from ..train.scorer import train_rounds
    from .companion import place_for, write
    from .inherit import BUDGET, INTERVAL, Trained

    require_int(rounds=rounds, trajectories=count, steps=steps, pairs=pairs, rows=rows)
    if (task is None) == (prompts is None):
        raise SparseRLError("give the prompts to learn from: either --task NAME or --prompts FILE.")
    place, trained = place_for(model, out), Trained.of(model)
    record = trained.record
    texts = read_texts(task, prompts, rounds * count, seed)
    lm, tokenizer = load_model(trained.model, dtype, seed=seed)
    ids = [text if isinstance(text, list) and isinstance(text[0], int) else encode(tokenizer, text) for text in texts]
    companion = fresh(lm, features, seed)
    set_companion(lm, "learned", companion)
    compressor = make("learned", protect_prompt=protect_prompt, window=window)
    engine = Engine(lm, compressor, budget or record.budget or BUDGET, interval or record.interval or INTERVAL, rows)
    sampling = Sampling(max_new_tokens or record.max_new_tokens or 256, stop_ids=stop_ids(lm, tokenizer))
    by_round = [ids[i * count : (i + 1) * count] for i in range(rounds)]
    for done in train_rounds(lm, engine, by_round, sampling, companion, steps, pairs, seed):
        typer.echo(
            f"round {done.number}: {done.trajectories} rollouts lost {done.lost:.1%} of their attention; "
            f"loss {done.before:.3f} -> {done.after:.3f}"
        )
    write(lm, tokenizer, place, whole=out is not None)
    typer.echo(f"written to {place}/learned.safetensors; use it with --compressor learned")


def read_texts(task: str | None, prompts: Path | None, count: int, seed: int) -> list:
    """`count` prompts (texts, messages or ids) of a task or a file; a file is repeated if it is too short."""
    if task is not None:
        from ..tasks import make as make_task

        return [prompt.text for prompt in make_task(task).sample(seed * count, count)]
    from .rollout import read_prompts

    assert prompts is not None
    lines = [line["tokens"] if "tokens" in line else line["text"] for line in read_prompts(prompts, "prompt")]
    return [lines[i % len(lines)] for i in range(count)]
