"""Checkpoints that are whole or absent: an ordinary Hugging Face folder, and beside it what training needs to go on.

    checkpoints/step-000010/    config.json, model.safetensors, tokenizer..., training.pt

A checkpoint is written under another name, flushed to disk, and renamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from .errors import CannotWrite, SparseRLError
from .models import no_progress_bar

_STATE = "training.pt"


def save_checkpoint(folder: Path, step: int, model, tokenizer, state: dict, keep: int) -> Path:
    """Write the checkpoint of a step and remove all but the newest `keep`."""
    path, partial = folder / f"step-{step:06d}", folder / f".step-{step:06d}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(partial, model, tokenizer)
        torch.save({"step": step, "torch_rng": torch.get_rng_state(), **state}, partial / _STATE)
        for file in partial.rglob("*"):
            _flush(file)
        if path.exists():
            shutil.rmtree(path)
        os.rename(partial, path)
        _flush(folder)
    except (OSError, RuntimeError) as error:  # torch and safetensors report a failed write as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, path) from error
    for _, old in find_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def save_model(folder: Path, model, tokenizer) -> None:
    try:
        with no_progress_bar():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def find_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first."""
    return sorted((int(p.name.removeprefix("step-")), p) for p in folder.glob("step-*") if (p / _STATE).is_file())


def load_state(path: Path) -> dict:
    """What `save_checkpoint` was given as `state`, and `step`; torch's random state is set."""
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    torch.set_rng_state(state.pop("torch_rng"))
    return state


def require_space(folder: Path, needed: int) -> None:
    """Refuse to start where a checkpoint would not fit."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SparseRLError(
            f"a checkpoint takes {needed / 2**20:,.0f} MiB, and a new one is written before an old one goes, but {folder} has "
            f"{free / 2**20:,.0f} MiB free; free some space, or choose another folder with --out."
        )


def disk_error(error: Exception, path: Path) -> CannotWrite:
    """A failed write in one sentence."""
    free = shutil.disk_usage(path.parent).free
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    why = "the disk is full" if full else str(error).splitlines()[0]
    return CannotWrite(
        f"{path} could not be written ({why}; {free / 2**20:,.0f} MiB free); nothing half-written was left there. Free some space and "
        "go on with --resume."
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
