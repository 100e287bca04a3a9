"""What users should know about a task's prompts before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from .base import Task


def notices(task: Task, other: Task | None = None) -> list[str]:
    """One sentence for each thing. `other`: the task of the evaluations."""
    others = [None] * len(task.members) if other is None else other.members
    if len(others) != len(task.members):  # evaluations have another mixture
        others = [None] * len(task.members)
    named = len(task.members) > 1
    return [
        f"{part.name}: {line}" if named else line
        for part, held_out in zip(task.members, others)
        for line in _notices(part, held_out)
    ]


def _notices(task: Task, other: Task | None) -> list[str]:
    lines = []
    if task.skipped:
        lines.append(f"{sum(task.skipped.values())} rows were omitted: {'; '.join(task.skipped_rows)}")
    if task.duplicates:
        kept = "; copies of held-out prompts are not trained on, the others are kept" if other else ", and are kept"
        lines.append(f"{task.duplicates} rows repeat an earlier prompt{kept}")
    if other is not None and other.template != task.template:
        templates = f"held-out prompts use the template {other.template}, training prompts {task.template}"
        lines.append(f"{templates}; accuracy may suffer")
    return lines


def first_texts(task: Task) -> Iterator[str]:
    """Prompts of a task that reads files, those that are text: the first thousand at most."""
    for part in task.members:
        prompts = part.sample(0, min(1000, part.num_prompts or 0))
        yield from (prompt.text for prompt in prompts if isinstance(prompt.text, str))
