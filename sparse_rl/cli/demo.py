"""`sparse-rl demo`: train a tiny model on a compressed cache with three methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the picture.")] = Path("runs/demo"),
) -> None:
    """Train a tiny model on a compressed cache with three methods side by side, in about two minutes."""
    from ..demo import run

    run(out)
