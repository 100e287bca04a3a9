"""`sparse-rl report`: run folders as a page, a picture or a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, nearest


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Default: report.html, .png or .md.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="html: a page; png: its main figures; md: a summary. Default: the ending of --out, else html.",
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page on this machine and update it while runs go on, until Ctrl-C."),
    ] = False,
    regret: Annotated[
        bool,
        typer.Option(
            "--regret", help="First compute, with each run's checkpoint, how much evicted tokens were missed."
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="The port for --live; 0: any free port.")] = 0,
) -> None:
    """Show runs: curves, warnings, and completions token by token with what every head still saw."""
    from ..report import FORMATS, write
    from ..report.serve import serve

    ending = out.suffix.removeprefix(".").lower() if out else ""
    kind = kind or (ending if ending in FORMATS else "html")
    if kind not in FORMATS:
        raise SparseRLError(f"there is no format {kind!r}; {nearest(kind, FORMATS)}")
    if regret:
        _compute_regret(runs)
    if live:
        serve(runs, port, typer.echo)
        return
    typer.echo(write(runs, out or Path(f"report.{kind}"), kind))


def _compute_regret(runs: list[Path]) -> None:
    """Compute the regret of every run; name those that fail, and stop only if all of them fail."""
    from ..report.read import find_runs
    from ..train.hindsight import write_hindsights

    found, failed = find_runs(runs)[0], []
    for run in found:
        try:
            typer.echo(f"{run}: {write_hindsights(run)}")
        except SparseRLError as error:
            failed.append(error)
            if len(failed) == len(found):
                raise
            typer.echo(f"{run}: no regret: {error}", err=True)
