"""What the site needs beyond mkdocs: links that leave docs/ lead to the repository, and the tutorial becomes a page.

A link to a file that does not exist is a warning, which `mkdocs build --strict` takes for an error.
"""

import json
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
log = logging.getLogger("mkdocs.hooks.links")


def on_files(files, config):
    files.append(File.generated(config, "tutorial.md", content=tutorial(ROOT / "docs/tutorial.ipynb")))
    return files


def on_page_markdown(markdown, page, config, files):
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match) -> str:
        target, anchor = found.group(1), found.group(2) or ""
        if target == "tutorial.ipynb":
            return f"](tutorial.md{anchor})"
        path = posixpath.normpath(posixpath.join("docs", here, target))
        if "://" in target or not target or path.startswith("docs/"):
            return found.group(0)
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{path}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)


def tutorial(notebook: Path) -> str:
    """Its text, and its code in blocks."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts)
