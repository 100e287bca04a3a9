"""Suggest what to change if a training run does not fit into memory: other settings, each with the memory it needs.

A setting is tried by planning the run with it: first each alone, then several together, from the smallest change to
the largest: recompute activations, smaller micro-batches, fewer rows, the optimizer's state on the host, adapters
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

LORA_RANK = 32  # rank of the adapters that are suggested
MOST_PROCESSES = 64
SHORTEST = 256  # the smallest max_new_tokens that is suggested


@dataclass(frozen=True)
class Setting:
    """Changed keys of a recipe, and the plan of the run with them."""

    keys: Mapping[str, Any]  # section.key: value
    plan: TrainingPlan
    processes: int = 1

    @property
    def options(self) -> str:
        """The keys as options of the command line."""
        shown = [f"--{key} {str(v).lower() if isinstance(v, bool) else v}" for key, v in self.keys.items()]
        return " ".join([*shown, *([f"on {self.processes} GPUs"] if self.processes > 1 else [])])


@dataclass(frozen=True)
class Fitting:
    """A run that does not fit, and settings that would."""

    recipe: Recipe
    prompt_tokens: int
    memory: int

    def text(self) -> str:
        """A table for people: settings that help, with the memory needed then; several together if none is enough."""
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
        """Each setting that saves memory, at the largest value that fits, or at the smallest if none fits."""
        found = [self._first_that_fits({}, key, values) for key, values in self._ways().items()]
        if (share := self._divided()) is not None:
            found.append(share)
        needed = plan_run(self.recipe, self.prompt_tokens).total_bytes
        return [s for s in found if s.plan.total_bytes < needed]

    def together(self) -> Setting | None:
        """Several settings that fit together; shorter responses, which change what can be learned, come last."""
        longest = self.recipe.rollout.max_new_tokens
        shorter = [longest >> i for i in range(1, longest.bit_length()) if longest >> i >= SHORTEST]
        tries = [{}, *({"rollout.max_new_tokens": tokens} for tokens in shorter)]
        return next((found for keys in tries if (found := self._together(keys)) is not None), None)

    def _together(self, keys: dict[str, Any]) -> Setting | None:
        """Add the keys of `_ways` in their order until the run fits, then drop those that are not needed."""
        ways, fixed = self._ways(keys.get("rollout.max_new_tokens")), keys
        for key, values in ways.items():
            setting = self._first_that_fits(keys, key, values)
            keys = dict(setting.keys)
            if setting.plan.fits(self.memory):
                return self._loosened(keys, ways, fixed)
        return None

    def _loosened(self, keys: dict[str, Any], ways: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> Setting:
        """Drop the keys that are not needed to fit, and loosen the others as far as possible."""
        for key in [key for key in keys if key not in fixed]:
            rest = {k: v for k, v in keys.items() if k != key}
            setting = self._plan(rest)
            keys = rest if setting.plan.fits(self.memory) else dict(self._first_that_fits(rest, key, ways[key]).keys)
        return self._plan(keys)

    def _ways(self, new_tokens: int | None = None) -> dict[str, Sequence[Any]]:
        """The keys that can save memory, each with its values from most to least memory.

        new_tokens: tokens of the longest response; None: as in the recipe
        """
        model, rows = self.recipe.model, self.recipe.rollout.rows
        longest = self.prompt_tokens + (new_tokens or self.recipe.rollout.max_new_tokens)
        tokens = self.recipe.micro_batch_tokens
        smaller = [tokens >> i for i in range(1, tokens.bit_length()) if tokens >> i > longest]
        smaller += [longest] if tokens > longest else []  # a trajectory is never divided
        ways: dict[str, Sequence[Any]] = {}
        if not self.recipe.checkpoints_gradients or self.recipe.keeps_products:
            ways["model.gradient_checkpointing"] = [True]  # selective is not proposed before a GPU has timed it
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
        """The learner divided among as few GPUs as suffice."""
        if self.recipe.has_separate_critic:  # which cannot be divided
            return None
        counts = (2**i for i in range(1, MOST_PROCESSES.bit_length()) if 2**i <= self.recipe.rollout.prompts)
        shares = (self._plan({"model.shard": True}, count) for count in counts)
        return next((share for share in shares if share.plan.fits(self.memory)), None)

    def _first_that_fits(self, keys: Mapping[str, Any], key: str, values: Sequence[Any]) -> Setting:
        """The first value of a key that fits, given other keys, or the last. Later values take less memory."""
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self._plan({**keys, key: values[middle]}).plan.fits(self.memory)
            low, high = (low, middle) if fits else (middle + 1, high)
        return self._plan({**keys, key: values[low]})

    def _plan(self, keys: Mapping[str, Any], processes: int = 1) -> Setting:
        return Setting(keys, plan_run(with_values(self.recipe, keys), self.prompt_tokens, processes), processes)
