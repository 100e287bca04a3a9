"""Where commands write what a compressor has learned about a model: beside it, or with a copy of it."""

from __future__ import annotations

from pathlib import Path

from ..errors import SparseRLError


def place_for(model: str, out: Path | None) -> Path:
    """The folder to write to; refused before any work where there is none."""
    from ..models import find_model
    from ..models.names import BUILT_IN

    if out is not None:
        if out.exists():
            raise SparseRLError(f"{out} exists already; choose another folder for --out.")
        return out
    folder = Path(find_model(model))
    if model in BUILT_IN or not folder.is_dir():
        raise SparseRLError(f"{model} is not a folder to write beside; say with --out where to save it with the file.")
    return folder


def write(model, tokenizer, place: Path, whole: bool) -> None:
    """The files of what the model carries; `whole`: and the model, in a new folder."""
    from ..models import save_companions
    from ..train.checkpoint import save_model

    if whole:
        place.mkdir(parents=True)
        save_model(place, model, tokenizer)
    else:
        save_companions(place, model)
