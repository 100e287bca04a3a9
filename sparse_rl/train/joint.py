"""Train the compressor `learned` jointly with the model: between steps its scorer learns what its evictions cost.

    collect    before the update, some trajectories of the step go through the learner's weights under their traces;
               every eviction gives pairs of slots, of which later queries attended more to the first (scorer.py)
    learn      after the update, the scorer does optimizer steps on these pairs; then sampler and pool get weights and
               scorer together (`Trainer.publish_weights`)

With `scorer.advantage`, the group's advantage also makes some evictions likelier or less likely (actions.py).

Replay stays exact while the scorer changes, because traces say what was evicted and the learner's forward pass never
uses the scorer. Without `rollout.ahead` the learner's weights are those that sampled. With several processes, each
collects from trajectories that it sampled, the first one learns from all pairs, and the others get its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compressors.learned import Learned
from ..config import Recipe
from ..distributed.world import World, exchanged
from ..models import companions_of
from ..streams import stream_key
from .actions import Actions
from .log import Clock
from .scorer import Collected, Drawn, Pairs, ScorerTrainer, collect_from, merged
from .step import StepRollout
from .worker import Sampler

SCORER_STREAM = 0x5C03E  # separates draws of trajectories and pairs from other random numbers of a step

exchanged(Collected, Pairs, Actions)


class JointScorer:
    """Collects pairs and trains the scorer of `learned`; does nothing if the recipe's `scorer.every` is 0."""

    def __init__(self, recipe: Recipe, model: nn.Module, whole: nn.Module, sampler: Sampler, world: World):
        """model: its scorer is trained; whole: a model with the same weights, not divided among processes"""
        self.settings, self.seed = recipe.scorer, recipe.run.seed
        self.whole, self.sampler, self.world = whole, sampler, world
        self.version = 0  # how often the scorer has been trained
        self.trainer: ScorerTrainer | None = None
        if self.settings.every:
            companion, temperature = companions_of(model)["learned"], self._compressor().temperature
            self.trainer = ScorerTrainer(companion, self.settings.lr, self.settings.advantage, temperature)

    def _compressor(self) -> Learned:
        compressor = self.sampler.engine.compressor.decides()
        assert isinstance(compressor, Learned)
        return compressor

    def collect(self, rollout: StepRollout, advantages: Tensor, step: int, clock: Clock) -> Collected | None:
        """Pairs (and actions) from the evictions of some trajectories of all processes; None if the scorer is not
        trained in this step. advantages: by position
        """
        settings = self.settings
        if self.trainer is None or (step + 1) % settings.every:
            return None
        compressor, acts = self._compressor(), settings.advantage > 0
        rows, owner_rank = rollout.chosen_rows.tolist(), rollout.scored.sampled.owner_rank

        def work() -> dict[int, Collected]:
            return {
                position: collect_from(
                    self.whole,
                    rollout.trajectories[rows[position]],
                    compressor,
                    settings.pairs,
                    stream_key(self.seed, [step, position], SCORER_STREAM),
                    Drawn(float(advantages[position]), settings.evictions) if acts else None,
                )
                for position in self._chosen(len(rows), step)
                if owner_rank[rows[position]] == self.world.rank
            }

        with clock.stage("scorer"):
            found = {position: it for part in self.world.run_on_all(work) for position, it in part.items()}
            return merged([found[position] for position in sorted(found)])

    def _chosen(self, positions: int, step: int) -> list[int]:
        """The positions of a step that the scorer learns from, the same in every process."""
        generator = torch.Generator().manual_seed(stream_key(self.seed, [step], SCORER_STREAM))
        return torch.randperm(positions, generator=generator)[: self.settings.trajectories].tolist()

    def learn(self, lessons: Collected | None, clock: Clock) -> dict[str, float]:
        """Train the scorer in place and return metrics; does nothing if nothing was evicted."""
        if self.trainer is None or lessons is None or not lessons.pairs:
            return {}
        with clock.stage("scorer"):
            losses, seed = (0.0, 0.0), stream_key(self.seed, [self.version], SCORER_STREAM)
            if self.world.first:
                losses = self.trainer.fit(lessons.pairs, self.settings.steps, seed=seed, actions=lessons.actions)
            if self.world.size > 1:
                own = ({name: x.cpu() for name, x in self.trainer.tensors.items()}, losses)
                tensors, losses = self.world.gather(own if self.world.first else ({}, losses))[0]
                self.trainer.take(tensors)
        self.version += 1
        return self._of_actions(lessons.actions) | {
            "scorer/loss/before": losses[0],
            "scorer/loss/after": losses[1],
            "scorer/lost/frac": lessons.lost,
            "scorer/pairs/count": float(sum(pairs.weight.numel() for pairs in lessons.pairs.values())),
        }

    @torch.no_grad()
    def _of_actions(self, actions: Mapping[int, Actions]) -> dict[str, float]:
        """Metrics of actions: whether rebuilt evictions agree with the traces, and how far log-probs have moved."""
        if self.trainer is None or not actions:
            return {}
        agreed = torch.cat([acted.agreed.flatten() for acted in actions.values()])
        moved = [self.trainer.log_probs(layer, acted).cpu() - acted.old for layer, acted in actions.items()]
        return {
            "scorer/actions/count": float(len(agreed)),
            "scorer/actions/agree/frac": agreed.double().mean().item(),
            "scorer/actions/drift/mean": torch.cat(moved).abs().double().mean().item(),
        }

    def state_dict(self) -> dict[str, Any] | None:
        if self.trainer is None:
            return None
        return {"version": self.version, **self.trainer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.trainer is not None:
            assert state is not None, "the run's recipe has a scorer that learns"
            self.version = int(state["version"])
            self.trainer.load_state_dict(state)
