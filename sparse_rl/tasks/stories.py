"""stories: word problems in which several people's things change hands. The solution tracks every quantity.

    Nora has 12 pens and 5 books. Omar has 7 pens and 9 books. Nora gives 4 pens to Omar. Omar buys as many books as
    Nora has. How many books do Nora and Omar have together?
->
    Step 1: Nora gives 4 pens to Omar. Nora had 12 pens and now has 12 - 4 = 8. Omar had 7 pens and now has 7 + 4 = 11.
    Step 2: Omar buys as many books as Nora has. Nora has 5 books. Omar had 9 books and now has 9 + 5 = 14.
    In the end Nora has 5 books and Omar has 14 books. 5 + 14 = 19.
    answer: 19

A step says what a quantity was before it, which may last have been said many steps ago, or in the story's first
sentences; the question is about several of them. So whoever forgets what was said early goes wrong.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import SparseRLError, require_int
from .base import GeneratedTask, final_answer, register
from .problem import Prompt

_DRAWS = 1000  # attempts to draw what people have at first
_MOST = 99  # no quantity grows beyond this
_WORDS = ("", "", "two", "three", "four", "five", "six")  # how many people

Key = tuple[str, str]  # who, and which things
State = dict[Key, int]


@dataclass(frozen=True)
class Theme:
    """The words of a story."""

    names: tuple[str, ...]
    things: tuple[tuple[str, str], ...]  # one and many
    gain: tuple[str, ...]  # verbs of getting some from elsewhere
    lose: tuple[str, ...]  # and of losing some
    hand: str  # of giving some to another
    own: str = "their"


_PEOPLE = ("Nora", "Omar", "Lena", "Hugo", "Iris", "Paul", "Rosa", "Emil")
THEMES = (
    Theme(
        _PEOPLE,
        (("pen", "pens"), ("book", "books"), ("sticker", "stickers")),
        ("buys", "finds"),
        ("sells", "loses"),
        "gives",
    ),
    Theme(
        _PEOPLE,
        (("apple", "apples"), ("pear", "pears"), ("plum", "plums")),
        ("picks", "buys"),
        ("eats", "sells"),
        "gives",
    ),
    Theme(
        _PEOPLE,
        (("shirt", "shirts"), ("hat", "hats"), ("coat", "coats")),
        ("orders", "buys"),
        ("sells", "returns"),
        "sends",
    ),
    Theme(
        ("The Heron", "The Gull", "The Swan", "The Crane", "The Falcon", "The Raven"),  # ships on a journey
        (("barrel", "barrels"), ("crate", "crates"), ("sack", "sacks")),
        ("loads", "takes on"),
        ("unloads", "delivers"),
        "hands",
        "its",
    ),
)


@dataclass(frozen=True)
class Event:
    """One sentence of a story, and what it changes: (whose and which things, by how much)."""

    text: str
    changes: tuple[tuple[Key, int], ...]
    looks_at: Key | None = None  # a quantity that the sentence names without its number


@register
class Stories(GeneratedTask):
    name = "stories"

    def __init__(
        self, people: int = 3, things: int = 2, steps: int = 6, highest: int = 20, seed: int = 0, split: str = "train"
    ):
        require_int(at_least=2, **{"stories: people": people, "stories: highest": highest})
        require_int(at_most=10_000, **{"stories: things": things, "stories: steps": steps})
        if people > 6 or things > 3 or highest > 50:
            raise SparseRLError(
                f"stories: people is {people}, things {things} and highest {highest}; use at most 6, 3 and 50."
            )
        super().__init__(seed, split)
        self.people, self.things, self.steps, self.highest = people, things, steps, highest

    def __getitem__(self, i: int) -> Prompt:
        """What people have at first decides the split, so no story of one split is in the other."""
        draw = self.numbers(i)
        theme = draw.choice(THEMES)
        names, things = draw.sample(theme.names, self.people), draw.sample(theme.things, self.things)
        keys = [(name, many) for name in names for _, many in things]
        start = self._start(draw, keys)
        state, events = dict(start), []
        for _ in range(self.steps):
            events.append(draw_event(draw, theme, names, things, state))
            apply(events[-1], state)
        asked, wanted = draw_question(draw, names, [many for _, many in things])
        facts = " ".join(f"{name} has {listed(_counts(start, name, things))}." for name in names)
        text = f"{facts} {' '.join(event.text for event in events)} {asked}\n"
        story = {
            "start": [[*key, count] for key, count in start.items()],
            "events": [
                {"text": e.text, "changes": [[*key, by] for key, by in e.changes], "looks_at": e.looks_at}
                for e in events
            ],
            "wanted": [list(key) for key in wanted],
            "ones": dict((many, one) for one, many in things),
            "number": sum(state[key] for key in wanted),
        }
        return Prompt(text, answer=story, index=i)

    def _start(self, draw: random.Random, keys: Sequence[Key]) -> State:
        for _ in range(_DRAWS):
            start = {key: draw.randint(2, self.highest) for key in keys}
            if is_held_out(list(start.values())) == (self.split == "held-out"):
                return start
        raise SparseRLError(
            f"stories: with highest {self.highest} there are too few stories for two splits; raise highest."
        )

    def solution(self, prompt: Prompt) -> str:
        story, lines = prompt.answer, []
        state = {(name, many): count for name, many, count in story["start"]}
        for number, event in enumerate(story["events"], 1):
            said = [event["text"]]
            if event["looks_at"] is not None:
                name, many = event["looks_at"]
                said.append(f"{name} has {counted(state[name, many], story['ones'][many], many)}.")
            for name, many, by in event["changes"]:
                before, now = state[name, many], state[name, many] + by
                had = counted(before, story["ones"][many], many)
                said.append(f"{name} had {had} and now has {before} {'+' if by > 0 else '-'} {abs(by)} = {now}.")
                state[name, many] = now
            lines.append(f"Step {number}: {' '.join(said)}")
        counts = [state[name, many] for name, many in story["wanted"]]
        ends = [f"{name} has {counted(state[name, many], story['ones'][many], many)}" for name, many in story["wanted"]]
        lines.append(f"In the end {listed(ends)}. {running_sum(counts)}.")
        return "\n".join([*lines, f"answer: {story['number']}"])

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the last answer is the number, written plainly."""
        return float(final_answer(text) == str(prompt.answer["number"]))


def draw_event(
    draw: random.Random, theme: Theme, names: Sequence[str], things: Sequence[tuple[str, str]], state: Mapping
) -> Event:
    """An event that is possible: nobody gives what is not there, and nothing grows beyond what is easily added."""
    while True:
        (who, other), (one, many) = draw.sample(list(names), 2), draw.choice(list(things))
        mine, theirs = state[who, many], state[other, many]
        kind = draw.choice(("gain", "lose", "hand", "half", "match"))
        few = draw.randint(1, 12)
        if kind == "gain" and mine + few <= _MOST:
            return Event(f"{who} {draw.choice(theme.gain)} {counted(few, one, many)}.", (((who, many), few),))
        if kind == "lose" and few <= mine:
            return Event(f"{who} {draw.choice(theme.lose)} {counted(few, one, many)}.", (((who, many), -few),))
        if kind == "hand" and few <= mine and theirs + few <= _MOST:
            return Event(
                f"{who} {theme.hand} {counted(few, one, many)} to {other}.", (((who, many), -few), ((other, many), few))
            )
        if kind == "half" and mine >= 2 and mine % 2 == 0 and theirs + mine // 2 <= _MOST:
            changes = (((who, many), -mine // 2), ((other, many), mine // 2))
            return Event(f"{who} {theme.hand} half of {theme.own} {many} to {other}.", changes)
        if kind == "match" and theirs >= 1 and mine + theirs <= _MOST:
            text = f"{who} {draw.choice(theme.gain)} as many {many} as {other} has."
            return Event(text, (((who, many), theirs),), looks_at=(other, many))


def draw_question(draw: random.Random, names: Sequence[str], many: Sequence[str]) -> tuple[str, list[Key]]:
    """A question about several quantities, and these."""
    kind = draw.choice(("all", "two", "one")) if len(many) > 1 else draw.choice(("all", "two"))
    things = draw.choice(list(many))
    if kind == "one":
        who = draw.choice(list(names))
        return f"How many {listed(many)} does {who} have in all?", [(who, thing) for thing in many]
    if kind == "two" or len(names) == 2:
        pair = draw.sample(list(names), 2)
        return f"How many {things} do {listed(pair)} have together?", [(name, things) for name in pair]
    return f"How many {things} do all {_WORDS[len(names)]} have together?", [(name, things) for name in names]


def apply(event: Event, state: State) -> None:
    for key, by in event.changes:
        state[key] += by


def is_held_out(counts: Sequence[int]) -> bool:
    """One in ten of what people can have at first, in whatever order."""
    return zlib.crc32(" ".join(map(str, sorted(counts))).encode()) % 10 == 0


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def listed(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c"""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def running_sum(counts: Sequence[int]) -> str:
    """5 + 14 = 19, 19 + 2 = 21"""
    steps, total = [], counts[0]
    for count in counts[1:]:
        steps.append(f"{total} + {count} = {total + count}")
        total += count
    return ", ".join(steps)


def _counts(state: Mapping, name: str, things: Sequence[tuple[str, str]]) -> list[str]:
    return [counted(state[name, many], one, many) for one, many in things]
