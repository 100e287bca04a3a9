"""`sparse-rl export`: a checkpoint as a plain Hugging Face folder, for other programs and for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, a student, or a run folder (its newest checkpoint).")
    ],
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights of their base model.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Also upload the folder to the hub under this id, such as me/model.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Also export the Python files that the checkpoint names (task, compressor)."),
    ] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder with a model card and the settings of its training."""
    from ..export import export as write
    from ..export import push as upload

    folder = write(checkpoint, to, merge, push, trust)
    typer.echo(f"written to {folder}")
    if push is not None:
        typer.echo(f"pushed to {upload(folder, push)}")
