"""`sparse-rl train`: start or resume a run, in one process or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import RecipePath, Trust, overrides, recipe_to_run


def train(
    context: typer.Context,
    recipe: RecipePath,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/ and the recipe's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    num_processes: Annotated[int, typer.Option(help="Processes on this machine, one per GPU.")] = 1,
    trust: Trust = False,
) -> None:
    """Train a model by reinforcement learning. Options change any key of the recipe: --rollout.budget 256 --lr 1e-5."""
    from ..files import names_code

    folder = out or (recipe if recipe.is_dir() else Path("runs") / recipe.stem)
    settings = recipe_to_run(recipe, overrides(context.args), trust)
    go_on = f"sparse-rl train {folder} --resume" + (
        " --trust" if any(map(names_code, settings.may_name_code().values())) else ""
    )
    if num_processes != 1:
        from ..distributed.launch import launch

        flags = [name for name, given in (("--resume", resume), ("--trust", trust)) if given]
        arguments = ["train", str(recipe), "--out", str(folder), *flags, *context.args]
        raise typer.Exit(launch(num_processes, arguments, folder, go_on))
    from ..distributed.world import PeerFailed, join_world, leave_world
    from ..train.run import train as start

    world, done = join_world(), False
    try:
        trainer = start(settings, folder, resume, world=world)
        done = True
    except PeerFailed:
        if world.first:
            raise
        raise typer.Exit(1) from None  # the process that failed and the first process have said why
    except KeyboardInterrupt:
        begun = (folder / "recipe.yaml").exists()
        several = f" --num-processes {world.size}" if world.size > 1 else ""
        hint = f"continue with: {go_on}{several}" if begun else "nothing had been started"
        if world.first:
            typer.echo(f"sparse-rl: stopped; {hint}", err=True)
        raise typer.Exit(130) from None
    finally:
        leave_world(world, failed=not done)
    if world.first:
        model = f"{folder}/checkpoints/step-{trainer.steps_done:06d}"
        best, kept = trainer.progress.best, ""
        if best is not None and best.step != trainer.steps_done:
            kept = f" (the best on held-out prompts, of step {best.step}, in {folder}/checkpoints/best)"
        done = f"{trainer.steps_done} step{'' if trainer.steps_done == 1 else 's'} done"
        typer.echo(f"{done}; the model is in {model}{kept}, curves in {folder}/metrics.jsonl")
