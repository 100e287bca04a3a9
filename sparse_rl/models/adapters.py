"""Find the base model that adapters on disk need, also if it was moved.

adapter_config.json    names the base as transformers finds it: a hub id, or the full path of a folder
sparse_rl.json         base: {name, path, relative, seed}; for bases that were moved with the adapters, and for those
                       that transformers cannot find: a GGUF file, or random weights
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from .folder import read_object
from .record import FILE, Record, record_of
from .tiny import is_tiny

CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"


def is_adapter(source: str) -> bool:
    """Whether a folder holds adapters, and not a whole model."""
    return (Path(source) / CONFIG).is_file() and not (Path(source) / "config.json").is_file()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence two warnings of peft that users would read: it calls transformers by a name that will be removed, and it
    names missing tensors, which we refuse.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        yield


def record_base(folder: Path, model) -> None:
    """Write the record of an adapter's model, and the place of its base, beside the adapters."""
    record = record_of(model) or Record()
    loaded = record.start if str(record.start).endswith(".gguf") else getattr(model.config, "_name_or_path", "")
    here = Path(loaded).resolve() if loaded and Path(loaded).exists() else None
    base: dict[str, Any] = {"name": record.start or loaded, "seed": record.start_seed}
    if here is not None:
        base |= {"path": str(here), "relative": os.path.relpath(here, folder.resolve())}
    (folder / FILE).write_text(json.dumps({**record.to_dict(), "base": base}, indent=1) + "\n", encoding="utf-8")
    if here is not None and here.is_dir():
        set_base(folder, str(here))


def set_base(folder: Path, base: str) -> None:
    """Tell transformers where the base is."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps({**config, _BASE: base}, indent=2) + "\n", encoding="utf-8")


def base_of(folder: str) -> tuple[str, int]:
    """(name, seed) with which `load_model` loads the base of adapters; raises if it is missing."""
    path, found = Path(folder) / CONFIG, _read(folder, FILE).get("base")
    about = {key: value for key, value in found.items() if type(value) in (str, int)} if type(found) is dict else {}
    named = str(_read(folder, CONFIG).get(_BASE) or "")
    name, seed = str(about.get("name") or named), int(about.get("seed", 0))
    if name == "tiny-sums" or is_tiny(name) or name.startswith("random:"):
        return name, seed
    relative = str(Path(folder, about["relative"])) if "relative" in about else ""
    for place in (str(about.get("path", "")), relative, named, name):
        if place and Path(place).exists():
            return place, seed
    if not name:
        raise SparseRLError(f"{path} names no base model, and adapters need one; add {_BASE}: a hub id or a folder.")
    if about.get("path") or Path(named).is_absolute() or name.split("/")[0] in (".", "..", "models", "runs"):
        was = about.get("path") or named
        raise SparseRLError(
            f"{folder} holds adapters of the model {name!r}, which was in {was} when they were trained but is not "
            f"there now; put it back, or write its new place as {_BASE} in {path} and remove `base` from {FILE} there."
        )
    return name, seed


def _read(folder: str, file: str) -> dict[str, Any]:
    path = Path(folder) / file
    return read_object(path) if path.is_file() else {}
