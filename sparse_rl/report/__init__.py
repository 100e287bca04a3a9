"""A report of runs: read run folders as they are, and make one page, one picture or one Markdown file of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FORMATS = ("html", "png", "md")


def write(runs: Sequence[str | os.PathLike], out: Path, kind: str = "html") -> Path:
    """Write the report of these runs. The file is complete or not there."""
    from ..files import replace_file
    from . import figures
    from .document import document
    from .page import page
    from .read import read_runs

    if kind == "html":
        content = page(document(runs)).encode()
    else:
        found, notes = read_runs(runs)
        content = figures.png(found) if kind == "png" else figures.markdown(found, notes).encode()
    replace_file(out, content)
    return out
