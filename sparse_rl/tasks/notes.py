"""notes: answer a question by looking up several small notes; each names the one to read next.

    Where is the friend of the friend of Nora?
->  look(Nora)       Nora lives in Oslo and likes tea, maps and rain. The friend of Nora is Emil.
    look(Emil)       Emil lives in Quito and likes ... The friend of Emil is Rosa.
    look(Rosa)       Rosa lives in Lima and ...
    answer: Lima

There are as many notes as people, other ones for every prompt, and no prompt shows them. Contexts grow with every
look-up, and what a note says is needed once: the next name, or the answer. The rest of it is dead on arrival.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple

from ..errors import require_int
from .base import GeneratedTask, final_answer, register
from .conversing import call_tools, called, said
from .problem import Message, Prompt

_SYLLABLES = ("ba", "do", "ka", "li", "mo", "na", "ri", "sa", "te", "vu")
_PLACES = ("Oslo", "Lima", "Quito", "Kyoto", "Cairo", "Porto", "Perth", "Turin", "Sofia", "Accra")
_LIKES = ("tea", "maps", "rain", "chess", "bread", "jazz", "moss", "ships", "glass", "plums", "owls", "salt")
_CHAT = "Look up notes with the tool, one person at a time, and end with a line `answer: PLACE`. "


def look(person: str) -> str:
    """Look up the note about a person.

    Args:
        person: the person's name
    """
    raise NotImplementedError  # the model reads this description; `reply` has the notes


@register
class Notes(GeneratedTask):
    name = "notes"
    tools = (look,)

    def __init__(
        self,
        people: int = 100,
        hops: int = 2,
        likes: int = 3,
        chat: bool = False,
        seed: int = 0,
        split: str = "train",
    ):
        """people: notes, one of each.
        hops: friends between the person that is named and the one that is asked for; it takes hops + 1 look-ups.
        likes: things that a note tells beside; more of them make longer notes.
        chat: prompts are chat messages, for models with a template that knows tools.
        """
        require_int(at_least=2, at_most=900, **{"notes: people": people})
        require_int(at_least=0, at_most=min(50, people - 2), **{"notes: hops": hops})
        require_int(at_least=0, at_most=1000, **{"notes: likes": likes})
        super().__init__(seed, split)
        self.people, self.hops, self.likes, self.chat = people, hops, likes, chat

    def notes_of(self, i: int) -> dict[str, Note]:
        return world(f"{self.seed}|{self.split}|{i}", self.people, self.likes)

    def __getitem__(self, i: int) -> Prompt:
        notes = self.notes_of(i)
        path = [next(iter(notes))]
        for _ in range(self.hops):
            path.append(notes[path[-1]].friend)
        question = f"Where is {'the friend of ' * self.hops}{path[0]}?"
        answer = {"path": path, "place": notes[path[-1]].place}
        text = [{"role": "user", "content": _CHAT + question}] if self.chat else question + "\n"
        return Prompt(text, answer, index=i)

    def reply(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
        notes = self.notes_of(prompt.index)

        def look(person: str) -> str:
            if person.strip() not in notes:
                raise ValueError("there is no note about this person")
            return notes[person.strip()].text

        return call_tools((look,), messages)

    def solution(self, prompt: Prompt) -> list[Message]:
        messages: list[Message] = []
        for person in prompt.answer["path"]:
            messages.append(called("look", person=person))
            messages += self.reply(prompt, messages) or ()
        return [*messages, said(f"answer: {prompt.answer['place']}")]

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(final_answer(text) == prompt.answer["place"])


class Note(NamedTuple):
    text: str
    place: str
    friend: str


@lru_cache(maxsize=512)
def world(key: str, people: int, likes: int) -> dict[str, Note]:
    """By name. Friends form one circle, so every path goes on."""
    draw = random.Random(f"notes|{key}|{people}|{likes}")
    names: dict[str, None] = {}
    while len(names) < people:
        names["".join(draw.choice(_SYLLABLES) for _ in range(3)).capitalize()] = None
    found, circle = {}, list(names)
    for name, friend in zip(circle, [*circle[1:], circle[0]], strict=True):
        place, things = draw.choice(_PLACES), ", ".join(draw.choice(_LIKES) for _ in range(likes))
        liked = f" and likes {things}" if likes else ""
        found[name] = Note(f"{name} lives in {place}{liked}. The friend of {name} is {friend}.", place, friend)
    return found
