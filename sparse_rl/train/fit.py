"""What to change when a training run does not fit: settings that take less memory, each with its figure.

A setting is tried by planning the run with it. First each alone, then several together, in the order in which they
change least: recompute activations, smaller micro-batches, fewer rows, the optimizer's state on the host, adapters
instead of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Recipe
from ..planning.memory import aligned, size
from ..planning.training import TrainingPlan
from .run import plan_run, with_values

LORA_RANK = 32  # of the adapters that are suggested
MOST_PROCESSES = 64
SHORTEST = 256  # tokens of a response that is suggested


@dataclass(frozen=True)
class Setting:
    """Keys of a recipe that differ, and the plan of the run with them."""

    keys: Mapping[str, Any]  # section.key: value
    plan: TrainingPlan
    processes: int = 1

    @property
    def options(self) -> str:
        """The keys as the command line takes them."""
        shown = [f"--{key} {str(v).lower() if isinstance(v, bool) else v}" for key, v in self.keys.items()]
        return " ".join([*shown, *([f"on {self.processes} GPUs"] if self.processes > 1 else [])])


@dataclass(frozen=True)
class Fitting:
    """A run that does not fit, and what would."""

    recipe: Recipe
    prompt_tokens: int
    memory: int

    def text(self) -> str:
        """For people: every setting that helps with what the run then takes; together, if none of them is enough."""
        alone = self.alone()
        enough = [s for s in alone if s.plan.fits(self.memory)]
        lines = [
            (s.options, f"{size(s.plan.total_bytes)}{': fits' if s in enough else ', not enough alone'}") for s in alone
        ]
        if not enough:
            together = self.together()
            if together is None:
                return (
                    f"No setting of this run fits {size(self.memory)}, nor do responses of {SHORTEST} tokens: use a "
                    "smaller model or shorter prompts."
                )
            lines.append((together.options, f"{size(together.plan.total_bytes)}: fits"))
        return f"What would take less:\n{aligned(lines)}"

    def alone(self) -> list[Setting]:
        """Each setting that takes less memory, at the largest value that fits, or the smallest if none does."""
        found = [self._first_that_fits({}, key, values) for key, values in self._ways().items()]
        if (share := self._divided()) is not None:
            found.append(share)
        needed = plan_run(self.recipe, self.prompt_tokens).total_bytes
        return [s for s in found if s.plan.total_bytes < needed]

    def together(self) -> Setting | None:
        """Settings that fit together; with shorter responses, which change what can be learned, only if needed."""
        longest = self.recipe.rollout.max_new_tokens
        shorter = [longest >> i for i in range(1, longest.bit_length()) if longest >> i >= SHORTEST]
        tries = [{}, *({"rollout.max_new_tokens": tokens} for tokens in shorter)]
        return next((found for keys in tries if (found := self._together(keys)) is not None), None)

    def _together(self, keys: dict[str, Any]) -> Setting | None:
        """Keys, and those of `_ways` in their order until they fit; then without those that are not needed."""
        ways, fixed = self._ways(keys.get("rollout.max_new_tokens")), keys
        for key, values in ways.items():
            setting = self._first_that_fits(keys, key, values)
            keys = dict(setting.keys)
            if setting.plan.fits(self.memory):
                return self._loosened(keys, ways, fixed)
        return None

    def _loosened(self, keys: dict[str, Any], ways: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> Setting:
        """Keys that fit together, without those that are not needed, and the others no tighter than they must be."""
        for key in [key for key in keys if key not in fixed]:
            rest = {k: v for k, v in keys.items() if k != key}
            setting = self._plan(rest)
            keys = rest if setting.plan.fits(self.memory) else dict(self._first_that_fits(rest, key, ways[key]).keys)
        return self._plan(keys)

    def _ways(self, new_tokens: int | None = None) -> dict[str, Sequence[Any]]:
        """The keys that take less memory, each with its values from most to least memory.

        new_tokens: of the longest response; None: the recipe's.
        """
        model, rows = self.recipe.model, self.recipe.rollout.rows
        longest = self.prompt_tokens + (new_tokens or self.recipe.rollout.max_new_tokens)
        tokens = self.recipe.micro_batch_tokens
        smaller = [tokens >> i for i in range(1, tokens.bit_length()) if tokens >> i > longest]
        smaller += [longest] if tokens > longest else []  # below, a trajectory goes alone anyway
        ways: dict[str, Sequence[Any]] = {}
        if not self.recipe.checkpoints_gradients:
            ways["model.gradient_checkpointing"] = [True]
        elif not self.recipe.offloads_activations and not model.shard:
            ways["model.gradient_checkpointing"] = ["offload"]
        if smaller:
            ways["learn.micro_batch_tokens"] = smaller
        if rows > 1:
            ways["rollout.rows"] = range(rows - 1, 0, -1)
        if not model.lora_rank and not model.shard and not self.recipe.optimizer.offload:
            ways["optimizer.offload"] = [True]
        if not model.lora_rank and not self.recipe.student.chunks:
            ways["model.lora_rank"] = [LORA_RANK]
        return ways

    def _divided(self) -> Setting | None:
        """The learner divided among the fewest GPUs that are enough."""
        if self.recipe.has_separate_critic:  # which cannot be divided
            return None
        counts = (2**i for i in range(1, MOST_PROCESSES.bit_length()) if 2**i <= self.recipe.rollout.prompts)
        shares = (self._plan({"model.shard": True}, count) for count in counts)
        return next((share for share in shares if share.plan.fits(self.memory)), None)

    def _first_that_fits(self, keys: Mapping[str, Any], key: str, values: Sequence[Any]) -> Setting:
        """The first value of a key that fits beside other keys; the last if none does. Later values take less."""
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self._plan({**keys, key: values[middle]}).plan.fits(self.memory)
            low, high = (low, middle) if fits else (middle + 1, high)
        return self._plan({**keys, key: values[low]})

    def _plan(self, keys: Mapping[str, Any], processes: int = 1) -> Setting:
        return Setting(keys, plan_run(with_values(self.recipe, keys), self.prompt_tokens, processes), processes)
