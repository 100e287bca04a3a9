"""`sparse-rl eval`: evaluate one model on one cache, or compare models and caches on the same problems."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SparseRLError, nearest
from ..signals import stoppable
from .options import Dtype, InheritedBudget, InheritedInterval, Trust, options_given, overrides

if TYPE_CHECKING:
    from ..evaluation.cache import Cache
    from ..evaluation.run import Asked, Evaluated


def eval_(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Hub id, folder, run folder or .gguf file; --compare takes several."),
    ],
    bench: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks and tasks, separated by commas: gsm8k,math500. A task's options are --NAME.KEY VALUE. "
            "Default: the task that the model was trained on."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The folder with the benchmarks' files. Default: $SPARSE_RL_DATA.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="A name from `sparse-rl list templates`. Default: as in training.")
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option(
            help="A name from `sparse-rl list compressors`; its options are --compressor.KEY VALUE. Default: as in "
            "training, else dense."
        ),
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="For the compressor `beacon`: tokens per beacon.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="For the compressor `beacon`: surprise in nats at which a chunk ends early.")
    ] = None,
    budget: InheritedBudget = None,
    interval: InheritedInterval = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Evaluate every model on every cache; write paired tests, a picture and a page."
        ),
    ] = False,
    compressors: Annotated[
        str | None,
        typer.Option(
            help="With --compare: compressors separated by commas, dense among them. Default: dense and those of "
            "training, else dense,rkv."
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(help="With --compare: budgets separated by commas. Default: those of training, else 512."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Completions per problem. Default: as published for benchmarks, 1 for tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Problems per benchmark. Default: all of them; 256 of an endless task.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="The longest response. Default: as published for benchmarks; tasks as in training, else 256."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of sampling; 0 is greedy. Default: 0.8 for benchmarks; tasks as in training, else 1."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw only from the likeliest tokens of this mass; 1 is off. Default: 0.95 for benchmarks, 1 for "
            "tasks."
        ),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(help="For tasks that reply: turns of a conversation. Default: as in training, else 8."),
    ] = None,
    max_given_tokens: Annotated[
        int | None, typer.Option(help="For tasks that reply: tokens of a reply. Default: as in training, else 512.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; an interrupted evaluation continues there. Default: under evals/."),
    ] = None,
    dtype: Dtype = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure how good a model is on a given cache, problem by problem; or compare models and caches."""
    from ..evaluation.cache import Cache
    from ..evaluation.run import Asked
    from .inherit import Trained, always, cache_of, caches_of, line_about, of_their_task, tasks_of

    named, rest = split_arguments(arguments, context)
    check_options(context, named, compare)
    trained = [Trained.of(name) for name in named]
    models, notes = [t.model for t in trained], {}
    benches = tasks_of(trained, bench, trust)
    notes |= {"task": benches[0]} if bench is None else {}
    options, own = parse_options(rest, context, benches)
    turns = {"max_turns": max_turns, "max_given_tokens": max_given_tokens}
    ways, said = {}, {"max_new_tokens": max_new_tokens, "temperature": temperature, **turns}
    instead = {"template", "chat", "suffix"} if template is not None else set()  # options that --template replaces
    for name in benches:
        brought, ways[name] = of_their_task(trained, name, instead | set(options[name]), said, trust)
        options[name] = {**brought, **options[name]}
        notes |= brought | ways[name]
    asked = Asked(
        benches, options, data, template, samples, limit, max_new_tokens, temperature, top_p, seed, rows, dtype, ways,
        **turns,
    )  # fmt: skip
    if compare:
        several = None if compressors is None else names(compressors, "--compressors")
        numbers = None if budgets is None else whole_numbers(budgets, "--budgets")
        chosen, taken = caches_of(trained, several, numbers, interval, own, trust)
    else:
        given = {"compressor": compressor, "budget": budget, "interval": interval}
        settings, taken = cache_of(trained[0], given, own, "dense", trust)
        found = compressor_options(settings.compressor, settings.options, chunk, threshold)
        chosen = [Cache.of(settings.compressor, settings.budget, settings.interval, found)]
    if line := line_about(models, {**taken, **notes, **always(trained, template)}.items()):
        say(line)
    root = out or Path("evals") / "-against-".join(map(slug, models))[:200]
    if compare:
        found = evaluate_all(models, chosen, asked, root, lambda model, cache: root / slug(model) / cache.folder, brief)
        intervals = ", ".join(dict.fromkeys(str(c.interval) for c in chosen if c.interval is not None)) or "none"
        about = f"{', '.join(asked.benches)}; seed {seed}; interval {intervals}; `sparse-rl {' '.join(sys.argv[1:])}`"
        print_comparison(found, root, about, as_json)
    else:
        show = (lambda done: typer.echo(json.dumps(done.to_dict()))) if as_json else print_table
        evaluate_all(models, chosen, asked, root, lambda _, cache: root if out else root / cache.folder, show)


def split_arguments(arguments: list[str], context: typer.Context) -> tuple[list[str], list[str]]:
    """(models, keys with their values); keys may stand among the models."""
    models, rest = [], []
    for i, argument in enumerate(arguments):
        value_of_key = i > 0 and arguments[i - 1].startswith("--") and "=" not in arguments[i - 1]
        (rest if argument.startswith("--") or value_of_key else models).append(argument)
    return models, [*rest, *context.args]


def parse_options(rest: list[str], context: typer.Context, benches: list[str]) -> tuple[dict[str, dict], dict]:
    """(options of every benchmark, options of the compressor); their values are written as in a recipe."""
    from ..config import parse_value

    options, own = {name: {} for name in benches}, {}
    for name, value in overrides(rest, "--countdown.count 3"):
        owner, _, key = name.rpartition(".")
        if owner == "compressor":
            own[key] = parse_value(value)
        elif owner in options or (owner == "task" and len(benches) == 1):
            options[benches[0] if owner == "task" else owner][key] = parse_value(value)
        else:
            parameters = [p for p in context.command.params if p.param_type_name == "option"]
            known = nearest(name, [p.opts[0].removeprefix("--") for p in parameters])
            keys = ", ".join(f"--{owner}.KEY VALUE" for owner in [*benches, "compressor"])
            raise SparseRLError(f"eval has no option --{name} (benchmarks and compressors have {keys}); {known}")
    return options, own


def compressor_options(compressor: str, own: dict, chunk: int | None, threshold: float | None) -> dict:
    """The compressor's options: its `own`, and --chunk and --threshold of beacons."""
    found = {name: value for name, value in (("chunk", chunk), ("threshold", threshold)) if value is not None}
    for name, value in found.items():
        if compressor.partition(":")[0] != "beacon":
            raise SparseRLError(
                f"--{name} {value} is for beacons, but the compressor is {compressor}; "
                "omit it, or use --compressor beacon."
            )
        if name in own:
            raise SparseRLError(
                f"--{name} {value} and --compressor.{name} {own[name]} set the same option; give one of them."
            )
    return own | found


OF_COMPARISONS = {"compressors": "compressor", "budgets": "budget"}  # option of --compare: the option without it
OF_ONE_CACHE = {"compressor": "compressors", "budget": "budgets", "chunk": "compressors", "threshold": "compressors"}


def check_options(context: typer.Context, models: list[str], compare: bool) -> None:
    """Refuse options of the other mode (with or without --compare), and too few, too many or repeated models."""
    given = options_given(context)
    for name, instead in (OF_ONE_CACHE if compare else OF_COMPARISONS).items():
        if name in given:
            mode = "with --compare" if compare else "without --compare"
            raise SparseRLError(f"--{name} has no meaning {mode}; use --{instead}, such as beacon:16 for beacons.")
    if not models or (len(models) > 1 and not compare):
        raise SparseRLError(f"{len(models)} models were given; give one, or add --compare to compare several.")
    if len({slug(model) for model in models}) < len(models):
        raise SparseRLError(
            f"two of {', '.join(models)} are the same model, or would write to the same folder; give each model once."
        )


def evaluate_all(
    models: list[str],
    chosen: list[Cache],
    asked: Asked,
    root: Path,
    folder_of: Callable[[str, Cache], Path],
    show: Callable[[Evaluated], None],
) -> list[Evaluated]:
    """Evaluate every model on every cache and show each result as soon as it is ready; Ctrl-C keeps
    finished results.
    """
    from ..evaluation.run import evaluate

    found = []
    try:
        with stoppable():
            for model in models:
                folder = partial(folder_of, model)
                for done in evaluate(model, chosen, asked, folder, say, progress=sys.stderr.isatty()):
                    found.append(done)
                    show(done)
    except KeyboardInterrupt:
        say(f"stopped; finished results are in {root}, and the same command continues from there.")
        raise typer.Exit(130) from None
    return found


def say(text: str) -> None:
    typer.echo(f"sparse-rl: {text}", err=True)


def brief(done: Evaluated) -> None:
    """One line about a cell of a comparison."""
    reward = f", mean reward {done.reward:.3f}" if any(s.graded_rewards for s in done.summaries) else ""
    say(f"{done.model}, {done.cache.label}: {done.accuracy:.1%}{reward}, {done.tokens_per_second:,.0f} tokens/s")


def print_table(done: Evaluated) -> None:
    """The evaluation of one model on one cache."""
    from ..evaluation.summary import table

    speed = f"{done.tokens_per_second:,.0f} tokens/s"
    typer.echo(f"{done.model}, {done.cache.label} ({done.rule}), {speed}: {done.folder}\n{table(done.summaries)}")


def print_comparison(found: list[Evaluated], root: Path, about: str, as_json: bool) -> None:
    """Write the page and the picture of a comparison, and print its table or its numbers."""
    from ..evaluation.compare import cross, text
    from ..evaluation.page import write

    cells = cross(found)
    paths = write(cells, root, about)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(cell) for cell in cells]))
    else:
        typer.echo(f"{text(cells)}\n\n{' '.join(map(str, paths))}")


def names(text: str, option: str) -> list[str]:
    """The names in a comma-separated value."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise SparseRLError(f"{option} is {text!r}; give at least one name.")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """The numbers in a comma-separated value."""
    found = names(text, option)
    if not all(number.isascii() and number.isdecimal() and int(number) > 0 for number in found):
        raise SparseRLError(f"{option} is {text!r}; give whole numbers of at least 1, with commas, such as 128,256.")
    return [int(number) for number in found]


def slug(model: str) -> str:
    """The name of a model's folder: runs/mine/checkpoints/step-000060 -> runs-mine-step-000060."""
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "students", "/", "..", ".")]
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in "-".join(parts))
