"""`sparse-rl eval`: parse, call, print."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, nearest
from ..signals import stoppable
from .options import Budget, Dtype, Interval, overrides


def eval_(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="Hub id, folder or .gguf file. With --compare one or more, on the same problems."
        ),
    ],
    bench: Annotated[
        str,
        typer.Option(
            help="Benchmarks and tasks, with commas: gsm8k,math500,countdown. Options of a task are --NAME.KEY VALUE."
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="The folder of the benchmarks' files. Default: $SPARSE_RL_DATA.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="A name from `sparse-rl list templates`. Default: as in training.")
    ] = None,
    compressor: Annotated[
        str, typer.Option(help="A name from `sparse-rl list compressors`; its options are --compressor.KEY VALUE.")
    ] = "dense",
    chunk: Annotated[int | None, typer.Option(help="Of the compressor `beacon`: tokens per beacon.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of the compressor `beacon`: nats at which a chunk ends early.")
    ] = None,
    budget: Budget = 512,
    interval: Interval = 128,
    compare: Annotated[
        bool, typer.Option("--compare", help="All models on all caches, with paired tests, a picture and a page.")
    ] = False,
    compressors: Annotated[
        str, typer.Option(help="With --compare: names, with commas; dense among them.")
    ] = "dense,rkv",
    budgets: Annotated[str, typer.Option(help="With --compare: numbers, with commas.")] = "512",
    samples: Annotated[
        int | None, typer.Option(help="Completions of each problem. Default: as published, 1 for tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Problems of each benchmark. Default: all, 256 where there is no end.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Default: as published, 256 for tasks.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: 0.8 for benchmarks, 1 for tasks.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off. Default: 0.95 for benchmarks, 1 for tasks.")] = None,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 64,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; a killed evaluation goes on there. Default: in evals/.")
    ] = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers, for programs.")] = False,
) -> None:
    """Say how good a model is, on a given cache: benchmarks or tasks, item by item; or compare models and caches."""
    from ..evaluation.cache import Cache, caches
    from ..evaluation.compare import cross, text
    from ..evaluation.page import write
    from ..evaluation.run import Asked, evaluate
    from ..evaluation.summary import table

    benches = names(bench, "--bench")
    models, options, own = split(arguments, context, benches)
    asked = Asked(
        benches, options, data, template, samples, limit, max_new_tokens, temperature, top_p, seed, rows, dtype
    )
    if compare:
        chosen = caches(names(compressors, "--compressors"), whole_numbers(budgets, "--budgets"), interval, own)
    else:
        chosen = [Cache.of(compressor, budget, interval, of_beacons(compressor, own, chunk, threshold))]
    check(context, models, compare)

    def say(what: str) -> None:
        typer.echo(f"sparse-rl: {what}", err=True)

    root = out or Path("evals") / "-against-".join(map(slug, models))[:200]
    found = []
    try:
        with stoppable():
            for model in models:
                where = root / slug(model) if compare else root
                folder = (
                    (lambda cache, where=where: where / cache.folder)
                    if compare or out is None
                    else (lambda cache, where=where: where)
                )
                for done in evaluate(model, chosen, asked, folder, say, progress=sys.stderr.isatty()):
                    found.append(done)
                    speed = f"{done.tokens_per_second:,.0f} tokens/s"
                    if compare:
                        say(f"{done.model}, {done.cache.label}: {done.accuracy:.1%}, {speed}")
                    elif not as_json:
                        typer.echo(
                            f"{done.model}, {done.cache.label} ({done.rule}), {speed}: {done.folder}\n{table(done.summaries)}"
                        )
    except KeyboardInterrupt:
        say(f"stopped; what was finished is in {root}, and the same command goes on.")
        raise typer.Exit(130) from None
    if not compare:
        if as_json:
            typer.echo(json.dumps(found[0].to_dict()))
        return
    cells = cross(found)
    how = f"{', '.join(asked.benches)}; seed {seed}; interval {interval}; `sparse-rl {' '.join(sys.argv[1:])}`"
    paths = write(cells, root, how)
    typer.echo(
        json.dumps([dataclasses.asdict(cell) for cell in cells])
        if as_json
        else f"{text(cells)}\n\n{' '.join(map(str, paths))}"
    )


OF_COMPARISONS = {"compressors": "compressor", "budgets": "budget"}  # and what says the same of a single cache


def check(context: typer.Context, models: list[str], compare: bool) -> None:
    """One way of asking at a time."""
    given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
    others = (
        ({**{one: many for many, one in OF_COMPARISONS.items()}, "chunk": "compressors", "threshold": "compressors"})
        if compare
        else OF_COMPARISONS
    )
    for name, instead in others.items():
        if name in given:
            how = "with --compare" if compare else "without --compare"
            raise SparseRLError(f"--{name} has no meaning {how}; use --{instead}, such as beacon:16 for beacons.")
    if not models or (len(models) > 1 and not compare):
        raise SparseRLError(f"{len(models)} models are named; give one, or several with --compare.")
    if len({slug(model) for model in models}) < len(models):
        raise SparseRLError(
            f"two of {', '.join(models)} are the same, or would have the same folder; name each model once."
        )


def split(arguments: list[str], context: typer.Context, benches: list[str]) -> tuple[list[str], dict[str, dict], dict]:
    """(models, options of every benchmark, options of the compressor): keys come among the models, with values as a recipe has them."""
    from ..config import parse_value

    models, rest = [], []
    for i, argument in enumerate(arguments):
        keyed = argument.startswith("--") or (
            i > 0 and arguments[i - 1].startswith("--") and "=" not in arguments[i - 1]
        )
        (rest if keyed else models).append(argument)
    options, own = {name: {} for name in benches}, {}
    for name, value in overrides([*rest, *context.args], "--countdown.count 3"):
        owner, _, key = name.rpartition(".")
        if owner == "compressor":
            own[key] = parse_value(value)
        elif owner in options or (owner == "task" and len(benches) == 1):
            options[benches[0] if owner == "task" else owner][key] = parse_value(value)
        else:
            known = [
                parameter.opts[0].removeprefix("--")
                for parameter in context.command.params
                if parameter.param_type_name == "option"
            ]
            keys = ", ".join(f"--{owner}.KEY VALUE" for owner in [*benches, "compressor"])
            raise SparseRLError(
                f"eval has no --{name} (options of benchmarks and compressors: {keys}); {nearest(name, known)}"
            )
    return models, options, own


def of_beacons(compressor: str, own: dict, chunk: int | None, threshold: float | None) -> dict:
    """The compressor's options, with those that beacons have as options of the command."""
    found = {name: value for name, value in (("chunk", chunk), ("threshold", threshold)) if value is not None}
    for name, value in found.items():
        if compressor.partition(":")[0] != "beacon":
            raise SparseRLError(
                f"--{name} {value} is for beacons, but the compressor is {compressor}; leave it away, or use --compressor beacon."
            )
        if name in own:
            raise SparseRLError(
                f"--{name} {value} and --compressor.{name} {own[name]} say the same thing; give it once."
            )
    return own | found


def names(text: str, option: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise SparseRLError(f"{option} is {text!r}; name at least one.")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    found = names(text, option)
    if not all(number.isascii() and number.isdecimal() and int(number) > 0 for number in found):
        raise SparseRLError(f"{option} is {text!r}; give whole numbers of at least 1, with commas, such as 128,256.")
    return [int(number) for number in found]


def slug(model: str) -> str:
    """A model as the name of a folder: runs/mine/checkpoints/step-000060 -> runs-mine-step-000060."""
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "students", "/", "..", ".")]
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in "-".join(parts))
