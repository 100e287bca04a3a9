"""The report as one HTML file: styles, scripts and data inside, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from .document import dumped

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("text", "curves", "figures", "runs", "trajectories", "map", "report")  # in this order, as one script


def page(document: dict) -> str:
    """The page of a document. No text of it can end the script that holds it, and nothing but our own script and style may run."""
    script = "".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    parts = {
        "policy": policy(script, style, live=document["live"] is not None),
        "style": style,
        "script": script,
        "data": dumped(document),
    }
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    return re.sub(
        r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template
    )  # one pass: text of the data is not looked at again


def policy(script: str, style: str, live: bool) -> str:
    """What the browser may run and load: this very script and style, and in a live page the server's data."""
    allowed = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",  # an empty icon, so that none is asked for
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{key} {value}" for key, value in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
