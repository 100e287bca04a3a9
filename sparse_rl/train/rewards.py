"""Rewards that a run adds to those of its task, as named parts of every grade.

    overlong        task.overlong: 0, then falling to -1 over the last tokens that a response may have (DAPO)
    entries         task.entry_price: the cache entries beside the prompt that a response held on average; they cost
    reward_model    task.reward_model: the score of a classifier that reads prompt and response

What is right, and so accuracy, stays for the task to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import Recipe
from ..errors import SparseRLError
from ..models import RewardModel, load_reward_model
from ..records import Trajectory, mean_entries
from ..tasks import UNGRADED, Grade, Prompt, Task

FEW = 4  # right completions, before anything is said of them


class AddedRewards:
    def __init__(self, recipe: Recipe):
        settings, self.longest = recipe.task, recipe.rollout.max_new_tokens
        self.buffer = max(1, round(settings.overlong * self.longest)) if settings.overlong else 0
        self.price, self.weight = settings.entry_price, settings.reward_model_weight
        weights = {"overlong": float(bool(self.buffer)), "entries": -self.price}
        self.for_length = {name: weight for name, weight in weights.items() if weight}
        self.model: RewardModel | None = None
        self.last_error: str | None = None  # why a completion has no score, for the caller to show once
        if settings.reward_model is not None:
            self.model = load_reward_model(settings.reward_model, settings.reward_model_tokens)
            check_context(self.model, self.longest)

    def grade(
        self, task: Task, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], texts: Sequence[str]
    ) -> list[Grade]:
        """What the task says of completions, and what is added to it."""
        grades = task.grade(prompts, texts)
        if self.buffer:
            values = [overlong(len(t.response_tokens), self.longest, self.buffer) for t in trajectories]
            grades = [with_part(grade, "overlong", value) for grade, value in zip(grades, values, strict=True)]
        if self.price:
            held = [mean_entries(t) - t.num_prompt_tokens for t in trajectories]
            grades = [with_part(grade, "entries", n, -self.price) for grade, n in zip(grades, held, strict=True)]
        if self.model is not None:
            scores = self.model.scores([prompt.text for prompt in prompts], texts)
            grades = [self._with_score(grade, score) for grade, score in zip(grades, scores, strict=True)]
        return self.settled(grades)

    def settled(self, grades: Sequence[Grade]) -> list[Grade]:
        """Completions that the reward model could not score get the lowest reward of all, at most 0, so that nobody
        learns to write such ones. To be said of a whole step: what a completion gets must not depend on which process
        graded it.
        """
        lowest = min([0.0, *(grade.reward for grade in grades if self._is_scored(grade))])
        return [grade if self._is_scored(grade) else replace(grade, reward=lowest) for grade in grades]

    def _is_scored(self, grade: Grade) -> bool:
        return self.model is None or "reward_model" in grade.parts

    def whatever_their_length(self, grades: Sequence[Grade]) -> Tensor:
        """The rewards of completions without what was added for their length and their entries; below all of them, of
        those without a score. fp64 [N]
        """
        rewards = torch.tensor([without(grade, self.for_length) for grade in grades], dtype=torch.float64)
        is_scored = torch.tensor([self._is_scored(grade) for grade in grades])
        return torch.where(is_scored, rewards, rewards.min() - 1)

    def _with_score(self, grade: Grade, score: float | None) -> Grade:
        """A completion that the reward model cannot score does not cost the run; `settled` says what it gets."""
        assert self.model is not None
        if score is not None and math.isfinite(grade.reward + self.weight * score):
            return with_part(grade, "reward_model", score, self.weight)
        counted = f", counted {self.weight} times," if score is not None and math.isfinite(score) else ""
        why = f"the score is {score}" if score is not None else f"a text is longer than {self.model.context} tokens"
        self.last_error = self.last_error or f"{why}{counted}, says the reward model {self.model.name}"
        return Grade(0.0, "error")

    def check(self, task: Task) -> None:
        """Refuse a reward model that cannot read the prompts of a task."""
        if self.model is not None:
            for member in task.members:
                self.model.encode(member.sample(0, 1)[0].text, "")


def without(grade: Grade, weights: Mapping[str, float]) -> float:
    """A grade's reward without these of its parts."""
    return grade.reward - sum(weight * grade.parts.get(name, 0.0) for name, weight in weights.items())


class PriceWatch:
    """Whether right completions pay so much for their cache entries that an empty completion, which is wrong and pays
    nothing, is worth as much. for_length: see AddedRewards.

    An empty completion is taken to get the least that any wrong one got before it paid, overlong's punishment left out.
    Where a task names several rewards, wrong ones may have earned some of them, so it is taken to get at most 0.
    """

    def __init__(self, for_length: Mapping[str, float]):
        self.for_length, self.price = for_length, -for_length.get("entries", 0.0)
        self.right: list[Grade] = []  # that were not judged yet
        self.lowest = math.inf  # reward of wrong completions before they paid

    def after(self, grades: Sequence[Grade]) -> str | None:
        """A sentence where the price is too high for the right completions of this step and of those before it that
        had too few of them; None otherwise, and where a lower price would not help.
        """
        grades = [grade for grade in grades if "entries" in self.for_length and "entries" in grade.parts]
        several = any(len(grade.parts.keys() - self.for_length.keys()) > 1 for grade in grades)
        bases = [without(grade, self.for_length) for grade in grades if not grade.right] + [0.0] * several
        self.lowest = min([self.lowest, *bases])
        self.right += [grade for grade in grades if grade.right]
        if len(self.right) < FEW:
            return None
        right, self.right = self.right, []
        empty = self.lowest if math.isfinite(self.lowest) else 0.0
        held = sum(grade.parts["entries"] for grade in right) / len(right)
        earned = sum(grade.reward for grade in right) / len(right)
        lead = earned + self.price * held - empty  # over an empty one, if entries cost nothing
        if held <= 0 or lead <= 0 or earned > empty:
            return None
        return (
            f"right completions hold {held:.1f} cache entries on average and pay {self.price * held:.2f} for them, so "
            f"their reward is {earned:.2f}, and an empty completion, which pays nothing, gets about {empty:.2f} (the "
            f"least that a wrong one got before it paid, or 0); set task.entry_price (now {self.price:g}) well below "
            f"{lead / held:.2g}."
        )


def check_context(model: RewardModel, longest: int) -> None:
    if model.context <= longest:
        raise SparseRLError(
            f"the reward model {model.name} reads {model.context} tokens, but responses alone have up to {longest} "
            f"(rollout.max_new_tokens); lower that below {model.context}, or use another reward model."
        )


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to longest - buffer tokens, then falling to -1 at longest."""
    return -max(0, tokens - (longest - buffer)) / buffer


def with_part(grade: Grade, name: str, value: float, weight: float = 1.0) -> Grade:
    """A grade with one more named reward, which a run adds to its task's; what is right stays for the task to say."""
    own = dict(grade.parts) if grade.parts or grade.verdict in UNGRADED else {"task": grade.reward}
    if name in own:
        raise SparseRLError(
            f"the task has a reward called {name!r}, which the run adds, too; give the task's another name."
        )
    return replace(grade, reward=grade.reward + weight * value, parts={**own, name: value})
