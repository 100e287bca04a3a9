"""The report as one HTML file with styles, scripts and data inside; it fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from . import palette
from .document import dumped

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "text",
    "curves",
    "figures",
    "runs",
    "samplers",
    "trajectories",
    "hindsight",
    "map",
    "report",
)  # joined in this order


def page(document: dict) -> str:
    """The page of a document. Text of the document cannot end the script that holds it, and only our script may run."""
    script = "".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    style = (ASSETS / "report.css").read_text(encoding="utf-8").replace("{{runs}}", palette.css())
    parts = {
        "policy": policy(script, style, live=document["live"] is not None),
        "style": style,
        "script": script,
        "data": dumped(document),
    }
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)  # one pass: {{...}} in the data stays


def policy(script: str, style: str, live: bool) -> str:
    """What the browser may run and load: exactly this script and style, and in a live page the server's data."""
    allowed = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",  # an empty icon, so that the browser does not ask for one
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{key} {value}" for key, value in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
