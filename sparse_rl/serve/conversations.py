"""Keep conversations in their rows: a request that names one only feeds what is new.

A name belongs to the API key that it came with. The new messages must begin with the old ones, including the server's
answers; only what follows is fed. Otherwise the conversation is begun anew (`LiveEngine.renew`), as it is where the
client asks for that: all messages are read, under a new trace. A name that was given up meanwhile is a new one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .desk import Desk, Ticket

Messages = list[dict[str, Any]]


@dataclass
class Kept:
    ticket: Ticket
    messages: Messages  # as prompts.past has them; the answer included
    since: float

    def precedes(self, messages: Messages) -> bool:
        """Whether these messages go on with the conversation, which is still there to be extended."""
        known = len(self.messages)
        more = len(messages) > known and messages[:known] == self.messages
        return more and self.ticket.conversation.status == "stopped"


class Conversations:
    """Keeps the latest conversations for a limited time."""

    def __init__(self, desk: Desk, most: int, seconds: float):
        self.desk, self.most, self.seconds = desk, most, seconds
        self._kept: OrderedDict[tuple[str, str, str], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: tuple[str, str, str]) -> Kept | None:
        """The conversation of that name. It is the caller's until `put` again.

        key: owner, name of the conversation, name of the model
        """
        self.expire()
        return self._kept.pop(key, None)

    def put(self, key: tuple[str, str, str], ticket: Ticket, messages: Messages) -> None:
        other = self._kept.pop(key, None)
        if other is not None:
            self.desk.forget(other.ticket)
        self._kept[key] = Kept(ticket, messages, time.monotonic())
        self.expire()

    def expire(self, now: Callable[[], float] = time.monotonic) -> None:
        """Give up those that are too old or too many."""
        while self._kept:
            kept = next(iter(self._kept.values()))
            if len(self._kept) <= self.most and now() - kept.since <= self.seconds:
                return
            self._kept.popitem(last=False)
            self.desk.forget(kept.ticket)
