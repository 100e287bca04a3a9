"""Compute the regret of a run's stored completions, for its report: one forward pass each, with the nearest weights.

A completion of step N was sampled with the weights after step N - 1 - `rollout.ahead`. Among the run's checkpoints, and
the starting model if it is on this machine, the nearest one is used; the result says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..cache.hindsight import Hindsight
from ..config import Recipe, load_recipe
from ..errors import SparseRLError
from ..files import find_checkpoints, lies_in, refuse_links_out, writing
from ..learn.regret import counterfactuals, give_back, regret
from ..models import load_model
from ..models.names import needs_hub
from ..records import Trajectory, read_trajectories

MOST = 64  # completions of a run, as many as its report shows
WORST = 8  # evicted tokens of a completion that are given back, one at a time


@dataclass
class Done:
    """What was computed. Completions with beacons are skipped: a beacon replaces tokens on purpose."""

    computed: int = 0
    there: int = 0
    with_beacons: int = 0
    steps: tuple[int, ...] = ()  # steps of the checkpoints that were used

    def __str__(self) -> str:
        weights = f" with the weights of step {', '.join(map(str, self.steps))}" if self.steps else ""
        others = [f"{self.there} had it already"] * bool(self.there)
        others += [f"{self.with_beacons} with beacons have none"] * bool(self.with_beacons)
        return f"regret of {self.computed} completions computed{weights}" + "".join(f"; {it}" for it in others)


def hindsight(model: nn.Module, trajectory: Trajectory, step: int, temperature: float, worst: int = WORST) -> Hindsight:
    """How much each evicted token was missed, and what giving back each of the worst would have changed."""
    mass = regret(model, trajectory.tokens, trajectory.trace).mass  # [L, H, T]
    total = mass.double().sum((0, 1))  # [T]
    tokens = total.argsort(descending=True, stable=True)[: min(worst, int((total > 0).sum()))]
    others = [give_back(trajectory.trace, torch.arange(len(total)) == token) for token in tokens]
    changes = torch.zeros(0, len(total))
    if others:
        changes = counterfactuals(model, trajectory.tokens, trajectory.trace, others, temperature)
    return Hindsight(step, mass.float(), tokens.to(torch.int32), changes.float())


def write_hindsights(run: Path, most: int = MOST) -> Done:
    """Compute the regret of the newest completions that have none yet, and write it beside their traces."""
    refuse_links_out(run, ["recipe.yaml", "samples", "checkpoints"])
    recipe, done, wanted = load_recipe(str(run / "recipe.yaml")), Done(), {}
    stored = ((step, samples, t) for step, samples in _newest(run) for t in _trajectories(run, samples))
    for step, samples, trajectory in itertools.islice(stored, most):
        path = samples / "regret" / f"{trajectory.prompt_index:06d}-{trajectory.sample_index:03d}.safetensors"
        with writing(path):
            there = path.is_file()
        if trajectory.beacon_id is not None:
            done.with_beacons += 1
        elif there:
            done.there += 1
        else:
            weights = _nearest(run, recipe, step - 1 - recipe.rollout.ahead)
            wanted.setdefault(weights, []).append((trajectory, path))
    for (step, name), pieces in sorted(wanted.items()):
        model, _ = load_model(name, recipe.model.dtype, seed=recipe.run.seed, logits=recipe.model.logits)
        for trajectory, path in pieces:
            found = hindsight(model, trajectory, step, recipe.rollout.temperature)
            with writing(path):
                path.parent.mkdir(exist_ok=True)
            found.save(path)
            done.computed += 1
        done.steps += (step,)
    return done


def _newest(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of a run's samples, newest first."""
    folders = [p for p in (run / "samples").glob("step-*") if p.name.removeprefix("step-").isdecimal()]
    if not folders:
        raise SparseRLError(f"{run} kept no completions; train with run.samples above 0 to compute their regret.")
    return sorted(((int(p.name.removeprefix("step-")), p) for p in folders), reverse=True)


def _trajectories(run: Path, samples: Path) -> Iterable[Trajectory]:
    names = ("trajectories.jsonl", "traces", "supports", "regret")
    for path in (samples, *(samples / name for name in names)):
        if not lies_in(path, run):
            raise SparseRLError(f"{path} links to a place outside the run's folder; put a file or folder in its place.")
    there = (samples / "trajectories.jsonl").is_file()  # otherwise the run is about to write it
    return read_trajectories(samples) if there else ()


def _nearest(run: Path, recipe: Recipe, step: int) -> tuple[int, str]:
    """(step, model) of the weights nearest to a step; of two, the older."""
    found = [(number, str(path)) for number, path in find_checkpoints(run / "checkpoints") if lies_in(path, run)]
    start = recipe.model.name
    if not needs_hub(start):
        found.append((0, start))
    if not found:
        raise SparseRLError(
            f"{run} has no checkpoint and its model {start} is not on this machine, but regret needs weights; fetch "
            "the model, or let the run reach a checkpoint (run.checkpoint_every)."
        )
    return min(found, key=lambda it: (abs(it[0] - step), it[0]))
