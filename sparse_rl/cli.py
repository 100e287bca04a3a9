"""The command line: parse, call, print. torch is imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .cli_eval import eval_
from .cli_options import Budget, CompressorName, Dtype, Interval, ModelName, overrides
from .cli_plan import plan
from .errors import RolloutInterrupted, SparseRLError, nearest

app = typer.Typer(
    help="Reinforcement learning of language models whose rollouts run on a compressed KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def rollout(
    model: ModelName,
    prompts: Annotated[Path, typer.Option(help="JSONL: each line has the prompt as `prompt` (text) or `tokens` (ids).")],
    out: Annotated[Path, typer.Option(help="Folder for trajectories.jsonl and traces/.")] = Path("rollouts"),
    compressor: CompressorName = "rkv",
    budget: Budget = 512,
    interval: Interval = 128,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 8,
    group_size: Annotated[int, typer.Option(help="Completions per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option()] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    stop_id: Annotated[list[int] | None, typer.Option(help="Token id that ends a response; repeatable. Default: the model's own.")] = None,
    field: Annotated[str, typer.Option(help="The field of a line that holds the prompt's text.")] = "prompt",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each text as a user's turn in the model's chat template.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Dtype = None,
) -> None:
    """Sample completions on a compressed cache; write text, log-probs and traces."""
    from .models import encode, load_model
    from .records import TrajectoryWriter, kv_tokens_saved
    from .rollout import Engine, Sampling
    from .stops import stop_ids

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(stop_id or ()))
    lines = read_prompts(prompts, field)
    lm, tokenizer = load_model(model, dtype, seed=seed)
    sampling = sampling if stop_id else replace(sampling, stop_ids=stop_ids(lm, tokenizer))
    if chat and tokenizer.chat_template is None:
        raise SparseRLError("this tokenizer has no chat template; leave --chat away.")
    texts = [[{"role": "user", "content": line["text"]}] if chat else line["text"] for line in lines if "text" in line]
    encoded = iter([encode(tokenizer, text) for text in texts])
    ids = [line["tokens"] if "tokens" in line else next(encoded) for line in lines]
    engine = Engine(lm, compressor=compressor, budget=budget, interval=interval, rows=rows)
    with TrajectoryWriter(out) as writer:

        def save(trajectory):
            prompt = tokenizer.decode(trajectory.prompt_tokens)
            writer.write(trajectory, prompt, tokenizer.decode(trajectory.response_tokens, skip_special_tokens=True))

        try:
            done = engine.generate(ids, group_size, sampling, seed, progress=sys.stderr.isatty(), on_finish=save)
        except RolloutInterrupted as stop:
            typer.echo(f"sparse-rl: interrupted; the {len(stop.trajectories)} finished trajectories are saved in {out}.", err=True)
            raise typer.Exit(130) from None
    typer.echo(
        f"{len(done)} trajectories, {sum(len(t.response_tokens) for t in done):,} tokens; KV tokens saved {kv_tokens_saved(done):.1%}, "
        f"KV bytes saved {engine.kv_bytes_saved(done):.1%}; written to {out}/trajectories.jsonl"
    )


def read_prompts(path: Path, field: str) -> list[dict]:
    """The prompts of a JSONL file: each {"tokens": ids} if the line has them, else {"text": what its `field` says}."""
    if not path.is_file():
        raise SparseRLError(f"there is no file {path}; give a JSONL file with one prompt per line.")
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SparseRLError(f"{path} is not UTF-8 text ({error}).") from error
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise SparseRLError(f"{path}, line {number} is not JSON ({error}).") from error
        if not isinstance(line, dict):
            raise SparseRLError(f"{path}, line {number} is not an object but {type(line).__name__}; give one object per line.")
        tokens = line.get("tokens")
        if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
            lines.append({"tokens": tokens})
        elif isinstance(line.get(field), str):
            lines.append({"text": line[field]})
        else:
            raise SparseRLError(
                f"{path}, line {number} has no text {field!r} and no list of token ids `tokens` (it has: {', '.join(line)}); "
                "name its field with --field."
            )
    if not lines:
        raise SparseRLError(f"{path} holds no prompts.")
    return lines


_WITH_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RecipePath = Annotated[Path, typer.Argument(help="A YAML recipe, a run folder that holds one, or a name from `sparse-rl list recipes`.")]


@app.command(context_settings=_WITH_OVERRIDES)
def train(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/ and the recipe's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    num_processes: Annotated[int, typer.Option(help="Processes on this machine, one for each GPU.")] = 1,
) -> None:
    """Train by reinforcement learning. Any key of the recipe can be changed: --rollout.budget 256 --lr 1e-5."""
    from .config import load_recipe

    folder = out or (recipe if recipe.is_dir() else Path("runs") / recipe.stem)
    settings = load_recipe(recipe, overrides(context.args))
    if num_processes != 1:
        from .launch import launch

        arguments = ["train", str(recipe), "--out", str(folder), *(["--resume"] if resume else []), *context.args]
        raise typer.Exit(launch(num_processes, arguments))
    from .run import train as start
    from .world import Elsewhere, join_world, leave_world

    world, done = join_world(), False
    try:
        trainer = start(settings, folder, resume, world=world)
        done = True
    except Elsewhere:
        if world.first:
            raise
        raise typer.Exit(1) from None  # said by the one that failed, and by the first
    except KeyboardInterrupt:
        begun = (folder / "recipe.yaml").exists()
        several = f" --num-processes {world.size}" if world.size > 1 else ""
        hint = f"go on with: sparse-rl train {folder} --resume{several}" if begun else "nothing had begun"
        if world.first:
            typer.echo(f"sparse-rl: stopped; {hint}", err=True)
        raise typer.Exit(130) from None
    finally:
        leave_world(world, failed=not done)
    if world.first:
        model = f"{folder}/checkpoints/step-{trainer.step:06d}"
        typer.echo(f"{trainer.step} steps done; the model is in {model}, curves in {folder}/metrics.jsonl")


@app.command(context_settings=_WITH_OVERRIDES)
def warmup(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[Path | None, typer.Option(help="Folder for the model. Default: models/ and the recipe's name.")] = None,
) -> None:
    """Train on a task's worked solutions, to make a model that reinforcement learning can improve."""
    from .config import load_recipe
    from .warmup import warmup as start

    folder = out or Path("models") / recipe.stem
    try:
        found = start(load_recipe(recipe, overrides(context.args)), folder)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(f"done: accuracy {found['accuracy']:.3f} on held-out prompts; the model is in {folder}")


app.command("eval", context_settings=_WITH_OVERRIDES)(eval_)
app.command(context_settings=_WITH_OVERRIDES)(plan)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="compressors, tasks, templates, presets, recipes or keys")]) -> None:
    """List what can be named in commands and recipes."""
    from .lists import LISTS

    if what not in LISTS:
        raise SparseRLError(f"there is no list of {what!r}; {nearest(what, LISTS)}")
    rows = LISTS[what]()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for *cells, last in rows:
        typer.echo("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths)), last]))


bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()  # so that `rollout` stays a word of the command, though it is the only one
def _bench() -> None: ...


@bench.command("rollout")
def bench_rollout(
    model_shape: Annotated[
        str, typer.Option(help="`tiny`, or a shape such as qwen2.5-1.5b: random weights, no download.")
    ] = "qwen2.5-1.5b",
    compressor: CompressorName = "rkv",
    budget: Budget = 512,
    interval: Interval = 128,
    rows: Annotated[int, typer.Option(help="Sequences, all decoded at once.")] = 256,
    prompt: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 256,
    new: Annotated[int, typer.Option(help="New tokens of every sequence; none stops early.")] = 3840,
    repeats: Annotated[int, typer.Option(help="Timed runs; the median one is told.")] = 3,
    peer: Annotated[str | None, typer.Option(help="`transformers`: model.generate on the same prompts beside it.")] = None,
    peer_new: Annotated[int, typer.Option(help="New tokens of the peer.")] = 128,
    dtype: Dtype = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers, for programs.")] = False,
) -> None:
    """Time whole rollouts of a model with random weights: tokens/s, milliseconds per step, memory, where the time went."""
    from .bench import Setting, measure, summary

    setting = Setting(model_shape, compressor, budget, interval, rows, prompt, new, repeats, peer, peer_new)
    result = measure(setting, dtype, device)
    typer.echo(json.dumps(result) if as_json else summary(result))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file. Default: report.html, .png or .md.")] = None,
    kind: Annotated[str, typer.Option("--format", help="html: the page; png: its main figures; md: a summary.")] = "html",
    live: Annotated[bool, typer.Option("--live", help="Serve the page on this machine while the runs write, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="With --live; 0 is any that is free.")] = 0,
) -> None:
    """Show runs: curves, what is wrong with them, completions token by token, and what every head still saw."""
    from .report import FORMATS, write
    from .report.serve import serve

    if kind not in FORMATS:
        raise SparseRLError(f"there is no format {kind!r}; {nearest(kind, FORMATS)}")
    if live:
        serve(runs, port, typer.echo)
        return
    typer.echo(write(runs, out or Path(f"report.{kind}"), kind))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the picture.")] = Path("runs/demo"),
) -> None:
    """Train a tiny model on a compressed cache with and without correction, side by side, in about two minutes."""
    from .demo import run

    run(out)


def main() -> None:
    try:
        code = app(standalone_mode=False)  # a number when a command asked to exit, else what it returned
    except SparseRLError as error:
        sys.exit(f"sparse-rl: {error}")
    except Exception as error:
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        error.show()  # a usage mistake, in click's own words
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
