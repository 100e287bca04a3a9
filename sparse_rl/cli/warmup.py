"""`sparse-rl warmup`: supervised training on worked solutions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import RecipePath, Trust, overrides


def warmup(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the model. Default: models/ and the recipe's name.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Train a model on a task's worked solutions, so that reinforcement learning can improve it."""
    from ..config import load_recipe_to_run
    from ..train.warmup import warmup as start

    folder = out or Path("models") / recipe.stem
    try:
        found = start(load_recipe_to_run(recipe, overrides(context.args), trust), folder)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(f"done: accuracy {found['accuracy']:.3f} on held-out prompts; the model is in {folder}")
