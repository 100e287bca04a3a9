"""Write what a compressor has learned about a model: beside the model, or with a copy of it."""

from __future__ import annotations

from pathlib import Path

from ..errors import SparseRLError


def place_for(model: str, out: Path | None) -> Path:
    """The folder to write to; raises before any work if there is none."""
    from ..models import find_model
    from ..models.names import BUILT_IN

    if out is not None:
        if out.exists():
            raise SparseRLError(f"{out} exists already; choose another folder for --out.")
        return out
    folder = Path(find_model(model))
    if model in BUILT_IN or not folder.is_dir():
        raise SparseRLError(f"{model} is not a folder, so nothing can be written beside it; save a copy with --out.")
    return folder


def write(model, tokenizer, place: Path, whole: bool) -> None:
    """Write the model's companion files; `whole`: also the model, into a new folder."""
    from ..models import save_companions
    from ..train.checkpoint import save_model

    if whole:
        place.mkdir(parents=True)
        save_model(place, model, tokenizer)
    else:
        save_companions(place, model)
