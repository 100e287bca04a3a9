"""Run folders: start one, or go on with one.

runs/NAME/recipe.yaml      the recipe with every key spelled out
         metrics.jsonl     one line per step: what was learned
         timing.jsonl      one line per step: what it took
         samples/          completions to read, with the evidence of every token and their traces
         checkpoints/      the newest few, each an ordinary Hugging Face folder
"""

from __future__ import annotations

from pathlib import Path

from .checkpoint import require_space
from .config import Recipe, load_recipe
from .errors import SparseRLError
from .metrics import write_text
from .train import Trainer


def train(recipe: Recipe, folder: str | Path, resume: bool = False, show: bool = True) -> Trainer:
    """Make a run folder, or go on with one, and train to the end."""
    folder = Path(folder)
    written = folder / "recipe.yaml"
    if written.exists() and not resume:
        raise SparseRLError(f"{folder} holds a run already; go on with --resume, or choose another folder with --out.")
    if resume:
        check_same(load_recipe(written), recipe, written)
    trainer = Trainer(recipe, folder, show)
    folder.mkdir(parents=True, exist_ok=True)
    trained = sum(p.numel() for p in trainer.learner.optimizer.parameters)
    require_space(folder, trained * 16 * 2)
    write_text(written, recipe.to_yaml())
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


FREE_TO_CHANGE = {"run.steps", "run.checkpoint_every", "run.keep", "run.trackers", "run.project", "run.max_skipped"}


def check_same(old: Recipe, new: Recipe, path: Path) -> None:
    """A resumed run must be the same run."""
    before, now = old.to_dict(), new.to_dict()
    for section in before:
        for name in {**before[section], **now[section]}:
            if f"{section}.{name}" not in FREE_TO_CHANGE and before[section].get(name) != now[section].get(name):
                then, given = before[section].get(name), now[section].get(name)
                raise SparseRLError(
                    f"{section}.{name} is {given!r} but {path} says {then!r}; resume with the recipe of the run "
                    f"(sparse-rl train {path.parent} --resume), or start another run."
                )
