"""Refuse names of models that do not exist: at once if possible, otherwise after a single request to the hub."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..errors import SparseRLError
from .folder import reading
from .shape import SHAPES
from .tiny import is_tiny

BUILT_IN = {"tiny-sums": Path(__file__).parent.parent / "assets" / "tiny-sums"}  # made by recipes/tiny-sums-warmup.yaml
_LOCAL = ("", ".", "..", "~", "models", "runs")  # first parts of a path that are no account on the hub
_CLOSE = 0.8  # of difflib: `tiny-sum` is meant to be `tiny-sums`


def needs_hub(name: str) -> bool:
    """Whether a name is neither a local file or folder nor a model that is made here."""
    return not (Path(name).exists() or is_tiny(name) or name in BUILT_IN or name.startswith("random:"))


def check_folder(name: str, known: Iterable[str] = ("tiny", *BUILT_IN)) -> None:
    """Refuse a name that can only be a local folder or file if there is none, and a misspelt one of the `known`,
    without asking the hub.
    """
    if not needs_hub(name) or name.lower() in SHAPES:
        return
    first, *rest = name.split("/")
    if rest and (first in _LOCAL or first.startswith("~")):
        maker = f"{Path(name).name}-warmup"
        shipped = (Path(__file__).parents[1] / "recipes" / f"{maker}.yaml").is_file()
        how = f"make it first with `sparse-rl warmup {maker} --out {name}`" if shipped else "make it first"
        raise SparseRLError(f"there is no model in {name}; {how}, or give another folder or a hub id.")
    close = [] if rest else difflib.get_close_matches(name.lower()[:100], known, n=1, cutoff=_CLOSE)
    if close and not _downloaded(name):
        raise SparseRLError(f"there is no model {name!r}; did you mean {close[0]!r}?")


def file_on_hub(source: str, file: str) -> Path | None:
    """A file of a model on the hub; None if that model lacks it. Raises one sentence if the model cannot be fetched."""
    from transformers.utils.hub import cached_file

    with reading(source):
        if not _downloaded(source):
            _ask(source)
        found = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


@cache
def _ask(source: str) -> None:
    """Make one request, which raises if there is no such model or no connection; a download would try many times."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except EntryNotFoundError:  # adapters, or a GGUF file
        return


def _downloaded(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, f), str) for f in ("config.json", "adapter_config.json"))
    except HFValidationError:  # not a name that the hub could have
        return False
