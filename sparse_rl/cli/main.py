"""The commands in one app, and `main`, which runs it.

A command's file parses options, calls the package and prints. torch is imported inside the commands, so --help is fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import SparseRLError
from ..files import is_text
from .allocate import allocate
from .bench import bench
from .calibrate import calibrate
from .data import data
from .demo import demo
from .eval import eval_
from .export import export
from .list import list_
from .plan import plan
from .report import report
from .rollout import rollout
from .serve import serve
from .train import train
from .train_compressor import train_compressor
from .warmup import warmup

WITH_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}  # any key of a recipe is an option

app = typer.Typer(
    help="Reinforcement learning of language models whose rollouts run on a compressed KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparse-rl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None: ...


app.command(context_settings=WITH_OVERRIDES)(rollout)
app.command(context_settings=WITH_OVERRIDES)(train)
app.command(context_settings=WITH_OVERRIDES)(warmup)
app.command()(data)
app.command("eval", context_settings=WITH_OVERRIDES)(eval_)
app.command(context_settings=WITH_OVERRIDES)(plan)
app.command()(export)
app.command()(calibrate)
app.command(context_settings=WITH_OVERRIDES)(allocate)
app.command("train-compressor")(train_compressor)
app.command("list")(list_)
app.add_typer(bench, name="bench")
app.command(context_settings=WITH_OVERRIDES)(serve)
app.command()(report)
app.command()(demo)


def main() -> None:
    """Run a command; a user's mistake becomes one sentence on stderr, without a traceback."""
    try:
        check_arguments(sys.argv)
        code = app(standalone_mode=False)  # a number if the command asked to exit, else what it returned
    except SparseRLError as error:
        sys.exit(f"sparse-rl: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"sparse-rl: {os.fsdecode(error.filename)} cannot be used: {error.strerror}.")
    except Exception as error:
        show, exit_code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or exit_code is None:
            raise
        show()  # a usage mistake, in click's own words
        sys.exit(exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def check_arguments(arguments: list[str]) -> None:
    """Refuse arguments that are not UTF-8, because neither JSON nor YAML could hold such a path."""
    for argument in arguments:
        if not is_text(argument):
            raise SparseRLError(f"{os.fsencode(argument)!r} is not UTF-8 text; rename it, or use another.")
