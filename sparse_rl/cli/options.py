"""Options that several commands share, and keys of recipes written as options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SparseRLError

if TYPE_CHECKING:
    from ..config import Recipe

ModelName = Annotated[
    str,
    typer.Argument(
        help="Hub id, folder, run folder, .gguf file, or `tiny` (random weights; tiny:4x256 for another size)."
    ),
]
Budget = Annotated[int, typer.Option(help="Cache slots that a sequence keeps at an eviction.")]
Interval = Annotated[int, typer.Option(help="Tokens between evictions.")]
InheritedBudget = Annotated[
    int | None,
    typer.Option(help="Cache slots that a sequence keeps at an eviction. Default: as in training, else 512."),
]
InheritedInterval = Annotated[
    int | None, typer.Option(help="Tokens between evictions. Default: as in training, else 128.")
]
CompressorName = Annotated[
    str, typer.Option(help="A name from `sparse-rl list compressors`, or your own FILE.py[:CLASS].")
]
RecipePath = Annotated[
    Path, typer.Argument(help="A YAML recipe, a run folder, or a name from `sparse-rl list recipes`.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code that the folder names: its task, compressor and estimator. Read it first.",
    ),
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's own.")]


def overrides(arguments: list[str], example: str = "--rollout.budget 256") -> list[tuple[str, str]]:
    """(key, value) of `--key value` and `--key=value`, in order."""
    found, rest = [], list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise SparseRLError(f"{name!r} is not a key; keys are written --section.key value, such as {example}.")
        name, equals, value = name.removeprefix("--").partition("=")
        if not equals:
            if not rest:
                raise SparseRLError(f"--{name} has no value; write --{name} VALUE.")
            value = rest.pop(0)
        found.append((name, value))
    return found


def recipe_to_run(path: Path, keys: list[tuple[str, str]], trust: bool) -> Recipe:
    """The recipe of a command that runs it. What does not fit a task or compressor of the command line is said, by the
    first of several processes.
    """
    from ..config import load_recipe_to_run

    def say(line: str) -> None:
        if "RANK" not in os.environ:  # the process that starts others has said it
            typer.echo(line, err=True)

    return load_recipe_to_run(path, keys, trust, takes, say)


def takes(section: str, name: str, option: str) -> bool:
    """Whether a task or compressor has an option. Files, and names that do not exist, are believed to. Of a dataset of
    reasoning-gym it is only the options that all datasets have.
    """
    if section == "task":
        from ..tasks.base import TASKS, VERIFIERS, takes_option

        return not (name in TASKS or name.startswith(("gym:", VERIFIERS))) or takes_option(name, option)
    from ..compressors.listing import takes_option as compressor_takes

    return compressor_takes(name, option)


def options_given(context: typer.Context) -> list[str]:
    """The options that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
