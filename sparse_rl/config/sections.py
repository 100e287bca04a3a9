"""The sections of a recipe that depend on nothing else: evaluations, the run itself, and the warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SparseRLError, check_count, require_int
from ..keys import key


@dataclass(frozen=True)
class EvalSettings:
    every: int = key("steps between evaluations on held-out prompts; 0: never", 10)
    prompts: int = key("held-out prompts", 64)
    samples: int = key("completions per held-out prompt", 1)
    temperature: float = key("the temperature of evaluations; 0 is greedy", 1.0)
    options: dict = key("task options that differ for held-out prompts, such as {files: test.jsonl}", {})

    def __post_init__(self):
        require_int(at_least=0, **{"eval.every": self.every})
        require_int(**{"eval.prompts": self.prompts, "eval.samples": self.samples})
        check_count("completions of an evaluation", self.prompts * self.samples)


@dataclass(frozen=True)
class RunSettings:
    steps: int = key("steps of the run; each learns from one rollout", 100)
    seed: int = key("seed of sampling and of random weights; the task's prompts follow task.seed", 0)
    checkpoint_every: int = key("steps between checkpoints; the last step always has one", 10)
    keep: int = key("number of checkpoints that are kept", 2)
    samples: int = key("completions written to samples/ at every evaluation and every 10 steps", 8)
    diagnose: int = key(
        "trajectories whose dense and sampler distributions are compared exactly every step (alpha); 0: none", 4
    )
    max_skipped: int = key(
        "optimizer steps in a row that may be skipped for non-finite numbers before the run stops", 5
    )
    trackers: list[str] = key("tensorboard, trackio or wandb, through accelerate", [])
    project: str = key("the project under which trackers file the run", "sparse-rl")

    def __post_init__(self):
        require_int(**{f"run.{n}": getattr(self, n) for n in ("steps", "checkpoint_every", "keep", "max_skipped")})
        require_int(at_least=0, **{f"run.{n}": getattr(self, n) for n in ("seed", "samples", "diagnose")})
        if self.seed >= 2**63:
            raise SparseRLError(f"run.seed is {self.seed}; it must be below 2^63.")


@dataclass(frozen=True)
class WarmupSettings:
    steps: int = key("optimizer steps on worked solutions", 300)
    batch: int = key("solutions per step", 64)
    lr: float = key("learning rate, constant after 20 steps", 2e-3)
    workers: int = key("processes that prepare batches; 0: batches are prepared between steps", 0)
    eval_every: int = key("steps between evaluations on held-out problems: loss and accuracy; 0: only at the end", 100)
    checkpoint_every: int = key("steps between checkpoints; 0: only when it is stopped", 100)

    def __post_init__(self):
        require_int(**{"warmup.steps": self.steps, "warmup.batch": self.batch})
        check_count("solutions per step", self.batch)
        counts = ("workers", "eval_every", "checkpoint_every")
        require_int(at_least=0, **{f"warmup.{name}": getattr(self, name) for name in counts})
