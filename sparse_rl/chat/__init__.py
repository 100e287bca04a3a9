from .converse import Talk, Turns, converse, graded_texts, talk_metrics, with_faults
from .render import Chat, Chats, appended, calls_in, first_messages

__all__ = [
    "Chat",
    "Chats",
    "Talk",
    "Turns",
    "appended",
    "calls_in",
    "converse",
    "first_messages",
    "graded_texts",
    "talk_metrics",
    "with_faults",
]
