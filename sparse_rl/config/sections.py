"""The sections `eval`, `run`, `scorer` and `warmup` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SparseRLError, check_count, require_int
from ..keys import key

if TYPE_CHECKING:
    from .recipe import RolloutSettings

LEARNING = ("learned", "prompt-only:learned")  # compressors that learn between steps


@dataclass(frozen=True)
class EvalSettings:
    every: int = key("steps between evaluations on held-out prompts; 0: never", 10)
    prompts: int = key("held-out prompts", 64)
    samples: int = key("completions per held-out prompt", 1)
    temperature: float = key("the temperature of evaluations; 0 is greedy", 1.0)
    options: dict = key("task options that replace those of training, such as {files: test.jsonl}", {})

    def __post_init__(self):
        require_int(at_least=0, **{"eval.every": self.every})
        require_int(**{"eval.prompts": self.prompts, "eval.samples": self.samples})
        check_count("completions of an evaluation", self.prompts * self.samples)


@dataclass(frozen=True)
class RunSettings:
    steps: int = key("steps of the run; each learns from one rollout", 100)
    seed: int = key("seed of sampling and of random weights; the task's prompts follow task.seed", 0)
    checkpoint_every: int = key("steps between checkpoints; the last step always writes one", 10)
    keep: int = key("newest checkpoints that are kept", 2)
    samples: int = key("completions written to samples/ at every evaluation and every 10 steps", 8)
    diagnose: int = key(
        "trajectories per step whose dense and sampler distributions are compared exactly (alpha); 0: none", 4
    )
    max_skipped: int = key(
        "optimizer steps in a row that may be skipped because of non-finite numbers before the run stops", 5
    )
    trackers: list[str] = key("experiment trackers, used through accelerate: tensorboard, trackio or wandb", [])
    project: str = key("the project under which trackers file the run", "sparse-rl")

    def __post_init__(self):
        require_int(**{f"run.{n}": getattr(self, n) for n in ("steps", "checkpoint_every", "keep", "max_skipped")})
        require_int(at_least=0, **{f"run.{n}": getattr(self, n) for n in ("seed", "samples", "diagnose")})
        if self.seed >= 2**63:
            raise SparseRLError(f"run.seed is {self.seed}; it must be below 2^63.")


@dataclass(frozen=True)
class ScorerSettings:
    """Joint training of the compressor `learned` with the model (train/joint.py)."""

    every: int = key("steps between trainings of the compressor `learned` on what its evictions cost; 0: never", 0)
    trajectories: int = key("trajectories that each training of the compressor learns from", 8)
    pairs: int = key("pairs of slots compared for each eviction of these trajectories, per layer and KV head", 8)
    steps: int = key("optimizer steps of each training of the compressor", 20)
    lr: float = key("constant learning rate of the compressor", 1e-3)
    advantage: float = key(
        "weight of a policy-gradient loss that treats evictions as actions: the trajectory's advantage makes them "
        "likelier or less likely; needs the compressor's option `temperature`; 0: off",
        0.0,
    )
    evictions: int = key("evictions per trajectory that scorer.advantage treats as actions", 4)

    def __post_init__(self):
        require_int(at_least=0, **{"scorer.every": self.every})
        require_int(
            **{f"scorer.{name}": getattr(self, name) for name in ("trajectories", "pairs", "steps", "evictions")}
        )
        if not 0 < self.lr < 1:
            raise SparseRLError(f"scorer.lr is {self.lr}; it must be above 0 and below 1.")
        if not 0 <= self.advantage < math.inf:
            raise SparseRLError(f"scorer.advantage is {self.advantage}; it must be 0 (off) or above.")

    def check(self, rollout: RolloutSettings, shard: bool, algorithm: str) -> None:
        """Refuse a run without such a compressor, or one whose whole weights are busy when the
        compressor is trained.
        """
        if not self.every:
            if self.advantage:
                raise SparseRLError(
                    f"scorer.advantage is {self.advantage}, but scorer.every is 0; set it to 1 or more."
                )
            return
        if rollout.compressor not in LEARNING:
            raise SparseRLError(
                f"scorer.every is {self.every}, but rollout.compressor is {rollout.compressor}, which learns nothing "
                f"between steps; use {' or '.join(LEARNING)}, or set scorer.every to 0."
            )
        if shard and rollout.ahead:
            raise SparseRLError(
                f"scorer.every is {self.every}, which needs whole weights between steps, but with model.shard and "
                f"rollout.ahead {rollout.ahead} only the sampler has them, and it is busy; set one of the three to 0 "
                "or false."
            )
        if self.advantage:
            self._check_actions(rollout, algorithm)

    def _check_actions(self, rollout: RolloutSettings, algorithm: str) -> None:
        """Refuse evictions as actions if they are not drawn at random, or cannot be drawn again."""
        options = rollout.compressor_options
        given = [name for name in ("protect_given", "forget_given") if options.get(name)]
        if not options.get("temperature"):
            why = "without a temperature they are not drawn; set rollout.compressor_options to {temperature: 1.0}"
        elif rollout.compressor != "learned":
            why = f"{rollout.compressor} only evicts prompts, in the same way for a whole group; use learned"
        elif rollout.ahead:
            why = f"with rollout.ahead {rollout.ahead} another scorer drew them; set rollout.ahead to 0"
        elif algorithm != "grpo":
            why = f"{algorithm} has no advantage per trajectory; use learn.algorithm: grpo"
        elif given:
            why = f"{given[0]} orders slots in another way; set it to 0"
        elif rollout.layer_budgets:
            why = "rollout.layer_budgets make the layers evict different numbers of slots; omit them"
        else:
            return
        raise SparseRLError(f"scorer.advantage is {self.advantage}, which makes evictions actions, but {why}.")


@dataclass(frozen=True)
class WarmupSettings:
    steps: int = key("optimizer steps on worked solutions", 300)
    batch: int = key("solutions per step", 64)
    lr: float = key("learning rate, constant after 20 steps", 2e-3)
    workers: int = key("processes that prepare batches; 0: batches are prepared between steps", 0)
    eval_every: int = key("steps between evaluations on held-out problems: loss and accuracy; 0: only at the end", 100)
    checkpoint_every: int = key("steps between checkpoints; 0: only when the warm-up is stopped", 100)

    def __post_init__(self):
        require_int(**{"warmup.steps": self.steps, "warmup.batch": self.batch})
        check_count("solutions per step", self.batch)
        counts = ("workers", "eval_every", "checkpoint_every")
        require_int(at_least=0, **{f"warmup.{name}": getattr(self, name) for name in counts})
