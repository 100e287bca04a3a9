"""`sparse-rl data`: obtain published data as files that tasks read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data(
    name: Annotated[str, typer.Argument(help="The data set: gsm8k.")],
    to: Annotated[Path, typer.Option(help="The folder under which the files are written.")] = Path("data"),
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A folder with the raw files (JSONL or parquet). Default: the Hugging Face hub."),
    ] = None,
) -> None:
    """Check the training and test problems of a published data set and write them as JSONL files."""
    from ..tasks.published import obtain

    obtain(name, to, source, typer.echo)
