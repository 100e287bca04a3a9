"""Write and read checkpoints: ordinary Hugging Face folders, plus what training needs to continue.

    checkpoints/step-000010/    config.json, model.safetensors, tokenizer..., training.pt; students/ if there are any
                                shards/ if the learner was divided among processes: each wrote its own part
                best            a link to the best one by held-out accuracy (best.py)

A checkpoint is written under another name, flushed to disk and renamed, so it is either whole or absent. Any number of
processes can continue from it.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ..beacon import beacon_of, save_beacon, without_beacon
from ..distributed.world import World
from ..errors import SparseRLError
from ..files import BEST, STATE, find_checkpoints, first_line, remove, writing
from ..learn.shards import is_divided, load_shards, save_shards
from ..models import no_progress_bar, record_base, save_companions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHARDS = "shards"
_PARTIAL, _REPLACED = ".step-{:06d}.partial", ".step-{:06d}.replaced"  # while a checkpoint is written

_LEFT = re.compile(r"\.(step-[0-9]{6,})\.(partial|replaced|removed)")  # what a kill may leave behind


def save_checkpoint(
    folder: Path,
    step: int,
    model,
    tokenizer,
    state: dict,
    keep: int,
    students: Mapping[str, Any] | None = None,
    world: World | None = None,
    best: int | None = None,
) -> Path:
    """Write the checkpoint of a step and of its students (by name); remove all but the newest `keep` and the `best`.

    The first process writes it, and every process writes its shards of the learner's state.
    """
    path, partial, replaced = (folder / name.format(step) for name in ("step-{:06d}", _PARTIAL, _REPLACED))
    world = world or World()
    state, shards = without_shards(state)

    def begin() -> None:
        with writing(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_model(partial, model, tokenizer)
            for name, student in (students or {}).items():
                save_model(partial / "students" / name, student, tokenizer)
            about = {"step": step, "torch_rng": torch.get_rng_state(), "shards": bool(shards)}
            torch.save({**about, **state}, partial / STATE)

    def write_shards() -> None:
        with writing(path):
            save_shards(shards, partial / _SHARDS)

    def finish() -> None:
        with writing(path):
            for file in partial.rglob("*"):
                flush(file)
            if path.exists():
                os.rename(path, replaced)
            os.rename(partial, path)
            flush(folder)
            shutil.rmtree(replaced, ignore_errors=True)
        keep_best(folder, best, keep)

    try:
        world.run_on_first(begin)
        if shards:
            world.run_on_all(write_shards)
        world.run_on_first(finish)
    finally:
        if world.first:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def cleaned_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, after cleaning up what a kill left behind.

    A checkpoint that was about to be replaced is restored. Files of other names belong to the user and stay, as does a
    checkpoint without its state.
    """
    for left in folder.glob(".step-*"):
        if (found := _LEFT.fullmatch(left.name)) is None:
            continue
        whole = folder / found[1]
        if found[2] == "replaced" and not whole.exists():
            os.rename(left, whole)
        else:
            remove(left)
    return find_checkpoints(folder)


def keep_best(folder: Path, best: int | None, keep: int) -> None:
    """Point the link at the checkpoint of step `best`, then remove all others but the newest `keep`."""
    found = find_checkpoints(folder)
    link = folder / f".{BEST}.link"
    target = None if best is None else dict(found).get(best)
    with writing(folder / BEST):
        link.unlink(missing_ok=True)
        if target is None:
            (folder / BEST).unlink(missing_ok=True)
        else:
            link.symlink_to(target.name)
            os.replace(link, folder / BEST)
            flush(folder)
    for step, old in found[:-keep]:
        if step != best:
            removed = folder / f".{old.name}.removed"
            os.rename(old, removed)  # renamed first, so that a kill cannot leave a part of it under its name
            remove(removed)


def without_shards(state: dict) -> tuple[dict, dict[str, DTensor]]:
    """The state with None for every tensor that is divided among processes, and these tensors by name."""
    shards = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner, f"{name}.{i}") for i, inner in enumerate(value)]
        if not is_divided(value):
            return value
        shards[name] = value
        return None

    return walk(state, "state"), shards


def with_shards(state: Any, like: Any, folder: Path) -> Any:
    """Undo `without_shards`: read the shards into tensors shaped like those of `like`, the state of this process, which
    may be whole or divided.
    """
    wanted = {}

    def walk(value: Any, model: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {
                key: walk(inner, model.get(key) if isinstance(model, dict) else None, f"{name}.{key}")
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [
                walk(inner, model[i] if isinstance(model, list) else None, f"{name}.{i}")
                for i, inner in enumerate(value)
            ]
        if value is None and isinstance(model, torch.Tensor):
            wanted[name] = torch.empty_like(model)
            return wanted[name]
        return value

    whole = walk(state, like, "state")
    load_shards(wanted, folder)
    return whole


def save_model(folder: Path, model, tokenizer) -> None:
    """Write an ordinary Hugging Face folder, with the model's beacon beside the weights if it has one."""
    with no_progress_bar():
        # embeddings keep their size, so peft need not ask the hub for that of the base
        options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        if beacon_of(model) is None:
            model.save_pretrained(folder, **options)
        else:
            model.save_pretrained(folder, state_dict=without_beacon(model.state_dict()), **options)
            save_beacon(folder, model)
    save_companions(folder, model)
    tokenizer.save_pretrained(folder)
    if not (folder / "config.json").exists():  # adapters have none
        record_base(folder, model)


def load_state(path: Path, like: dict | None = None) -> dict:
    """The `state` given to `save_checkpoint`, with `step`; also restores torch's random state.

    `like`: the present state, for its shapes; needed if processes wrote shards.
    """
    with restoring(path):
        with zipfile.ZipFile(path / STATE) as file:  # torch writes checksums but does not check them
            if (torn := file.testzip()) is not None:
                raise ValueError(f"the checksum of {torn} is wrong")
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        if path.name != f"step-{state['step']:06d}":
            raise ValueError(f"it is of step {state['step']}")
        torch.set_rng_state(state.pop("torch_rng"))
    if not state.pop("shards", (path / _SHARDS).is_dir()):
        return state
    try:
        return with_shards(state, like or {}, path / _SHARDS)
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, SafetensorError) as error:
        if isinstance(error, SparseRLError):
            raise
        raise SparseRLError(
            f"{path / _SHARDS} is damaged ({first_line(error)}); remove {path} to continue from the checkpoint before."
        ) from error


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn any error while a checkpoint's state is read into one sentence that names the checkpoint."""
    try:
        yield
    except (SparseRLError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged bytes lead to errors of any type
        why = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)[:300]
        raise SparseRLError(
            f"{path / STATE} is damaged ({why}); remove {path} to continue from the checkpoint before."
        ) from error


def require_space(folder: Path, needed: int) -> None:
    """Refuse to start if a checkpoint would not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SparseRLError(
            f"a checkpoint takes {needed / 2**20:,.0f} MiB, but {folder} has only {free / 2**20:,.0f} MiB free (a new "
            "checkpoint is written before an old one is removed); free some space, or choose another folder with --out."
        )


def flush(path: Path) -> None:
    """Wait until a file or folder has been written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
