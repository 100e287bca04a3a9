"""`sparse-rl warmup`: supervised training on worked solutions."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from .options import RecipePath, Trust, overrides, recipe_to_run


def warmup(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the model. Default: models/ and the recipe's name.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the warm-up in that folder.")] = False,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Skip all evaluations, those during the warm-up and the one at its end.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train a model on a task's worked solutions, so that reinforcement learning has something to improve."""
    from ..train.warmup import warmup as start

    folder = out or (recipe if recipe.is_dir() else Path("models") / recipe.stem)
    try:
        settings = recipe_to_run(recipe, of_warmup(overrides(context.args)), trust)
        found = start(settings, folder, resume, evaluate=not no_eval)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    about = f"accuracy {found['accuracy']:.3f} on held-out prompts; " if found else ""
    typer.echo(f"done: {about}the model is in {folder}")


def of_warmup(given: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Keys with the section that may be left out: `--steps` and `--lr` are the warm-up's, not those of RL."""
    from ..config.sections import WarmupSettings

    own = {field.name for field in fields(WarmupSettings)}
    return [(f"warmup.{name}" if name.replace("-", "_") in own else name, value) for name, value in given]
