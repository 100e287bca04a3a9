from .converse import Talk, Turns, converse, graded_texts, talk_metrics, with_faults
from .render import Chat, Chats, first_messages

__all__ = [
    "Chat",
    "Chats",
    "Talk",
    "Turns",
    "converse",
    "first_messages",
    "graded_texts",
    "talk_metrics",
    "with_faults",
]
