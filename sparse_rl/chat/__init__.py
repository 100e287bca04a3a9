from .render import Chat, Chats, first_messages

__all__ = ["Chat", "Chats", "first_messages"]
