"""A model that cannot answer yet: one sentence says what is missing, and what to do about it.

Reinforcement learning needs completions that end, give an answer, and differ in reward within a group. Where (nearly)
none do, steps change nothing, and a benchmark measures the format instead of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import any_of

NEARLY_ALL = 0.95
FEWEST = 8  # completions; fewer say too little
UNGRADED_BY = {  # verdict -> why completions could not be graded, and the remedy; {}: what is asked
    "error": "{} fails: correct it (`grading failed` says where)",
    "timeout": "{} takes too long: make it faster, or give it a longer deadline",
    "bad gold": "the reference answers cannot be read: correct them",
}


@dataclass(frozen=True)
class Answers:
    """What a step's or an evaluation's completions were like, as shares of them."""

    count: int
    right: float
    cut: float  # stopped by the longest length, not by the model
    no_answer: float  # the grader found nothing that looks like an answer
    max_new_tokens: int
    groups: int = 0  # of completions that share a prompt; 0: nothing is learned from them
    flat: float = 0.0  # the share of groups whose members all have the same reward
    ungraded: Mapping[str, int] = field(default_factory=dict)  # verdict -> completions that could not be graded
    turns: float = 0.0  # of a conversation, on average; 0: the task does not reply


@dataclass(frozen=True)
class Names:
    """What the remedies are called where the sentence is shown."""

    max_new_tokens: str
    template: str | None  # None: the task's prompts have a form of their own
    warmup: str = "warm the model up on worked solutions (`sparse-rl warmup`)"
    max_turns: str = "rollout.max_turns"


def cannot_answer(found: Answers, names: Names) -> tuple[str, str] | None:
    """(what is missing, the sentence that says so); None if the model answers, or if there is too little to judge."""
    if found.count < FEWEST:
        return None
    failed = sum(found.ungraded.values())
    if failed >= NEARLY_ALL * found.count:
        most = max(found.ungraded, key=lambda verdict: found.ungraded[verdict])
        asked = "the task's reply or its reward function" if found.turns else "the reward function"
        return "grades", (
            f"{failed / found.count:.0%} of {found.count} completions could not be graded and count as wrong, whatever "
            f"the model wrote, because {UNGRADED_BY[most].format(asked)}."
        )
    prompts = [f"change the prompts ({names.template})"] if names.template else []
    if found.cut >= NEARLY_ALL and found.right < 0.5:
        what, limits = "completions", names.max_new_tokens
        if found.turns:
            what, limits = f"conversations ({found.turns:.1f} turns on average)", f"{limits} or {names.max_turns}"
        return "stops", (
            f"{found.cut:.0%} of {found.count} {what} did not stop within {found.max_new_tokens} tokens"
            f"{' and the turns that they may have' * bool(found.turns)}, and {found.right:.0%} are right: "
            f"{any_of(f'raise {limits}', names.warmup, *prompts)}."
        )
    if found.no_answer >= NEARLY_ALL:
        return "answers", (
            f"{found.no_answer:.0%} of {found.count} completions give no answer that the task can read, such as a "
            f"\\boxed{{}}; to teach the format, {any_of(names.warmup, *(prompts or ['show it in the prompts']))}."
        )
    if found.groups * found.flat >= max(2.0, NEARLY_ALL * found.groups):
        said = f"in {found.flat:.0%} of {found.groups} groups all completions have the same reward: nothing is learned"
        if found.right >= 0.5:
            return "varies", f"{said}; {found.right:.0%} are right: the problems are too easy, use harder ones."
        remedy = any_of("use easier problems", "use a larger rollout.group_size", names.warmup)
        return "varies", f"{said}; {found.right:.0%} are right: {remedy}."
    return None
