"""The page at /: a chat with the model, and a map of what every head still sees while the answer grows."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .service import Service


def page(service: Service) -> str:
    """One file that fetches nothing but the server's own routes."""
    about = {
        "models": [service.about(name) for name in service.desk.places],
        "key": bool(service.settings.api_keys),
        "layers": next(iter(service.desk.places.values())).engine.shape.layers,
        "heads": next(iter(service.desk.places.values())).engine.shape.heads,
        "chat": getattr(service.tokenizer, "chat_template", None) is not None,
    }
    text = files(__name__.rpartition(".")[0]).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(about).replace("<", "\\u003c")
    title = html.escape(next(iter(service.desk.places)))
    return text.replace("__TITLE__", title).replace("__ABOUT__", data)
