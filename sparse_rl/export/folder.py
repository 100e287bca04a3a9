"""Export a checkpoint as a plain Hugging Face folder, without the state of training and with what others need.

config.json, weights, tokenizer, chat template    as in the checkpoint; with `merge` adapters are in the weights
generation_config.json                            stops where training stopped
README.md                                         the model card
FILE.py                                           a task or compressor of the user's own
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..errors import SparseRLError
from ..files import STATE, first_line, read_lines, refuse_links_out, writing
from ..models import (
    Record,
    base_of,
    find_model,
    is_adapter,
    load_merged,
    no_progress_bar,
    read_record,
    reading,
    save_companions,
    set_base,
)
from .card import Card
from .portable import check_foreign, portable, python_files, text_without_folders, without_folders, write_portable


def export(source: str, to: Path, merge: bool = False, name: str | None = None, trust: bool = False) -> Path:
    """Write the checkpoint `source` (for a run folder, the newest) to the folder `to`.

    `name`: its name in the card; `trust`: also export Python files that the checkpoint names in other folders
    """
    folder = find_model(source)
    if not Path(folder).is_dir():
        raise SparseRLError(f"{folder} is not a folder; give a checkpoint, or a run folder.")
    if to.exists():
        raise SparseRLError(f"{to} exists already; choose another folder with --to, or remove it.")
    adapters = is_adapter(folder)
    if merge and not adapters:
        raise SparseRLError(f"{folder} holds a whole model, so there is nothing to merge; omit --merge.")
    refuse_links_out(Path(folder), sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*")))
    if Path(folder).parent.name == "checkpoints":
        named = ("recipe.yaml", "metrics.jsonl", f"checkpoints/{Path(folder).name}")
        refuse_links_out(Path(folder).parent.parent, named)
    if name and adapters and not merge and Path(base := base_of(folder)[0]).exists():
        raise SparseRLError(f"{folder} holds adapters of {base}, which nobody else has; push it with --merge.")
    record = read_record(folder) or Record()
    files = python_files(record)
    check_foreign(Path(folder), files, trust)
    partial = to.with_name(f".{to.name}.partial")
    with writing(to):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            if merge:
                _merge(folder, partial)
            else:
                _copy(folder, partial)
            _write_generation_config(partial, record, folder)
            write_portable(partial, portable(record), files)
            base = without_folders(base_of(folder)[0]) if adapters and not merge else None
            card = card_of(Path(folder), portable(record), name or to.name, base)
            (partial / "README.md").write_text(card.text(), encoding="utf-8")
            os.rename(partial, to)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return to


def _copy(folder: str, to: Path) -> None:
    """Copy all files but the state of training. Adapters must have a base that transformers can find without us."""
    base = base_of(folder)[0] if is_adapter(folder) else None
    if base is not None and not (Path(base).is_dir() or ("/" in base and not Path(base).exists())):
        raise SparseRLError(
            f"{folder} holds adapters of {base}, which transformers cannot load by that name; export a whole model "
            "with --merge."
        )
    for file in sorted(Path(folder).iterdir()):
        if file.is_file() and file.name != STATE:
            shutil.copyfile(file, to / file.name)
    if base is not None:
        set_base(to, str(Path(base).resolve()) if Path(base).exists() else base)


def _merge(folder: str, to: Path) -> None:
    """Write the base model with the adapters merged into its weights."""
    merged, tokenizer = load_merged(folder)
    with no_progress_bar():
        merged.save_pretrained(to)
    save_companions(to, merged)
    tokenizer.save_pretrained(to)


def _write_generation_config(folder: Path, record: Record, source: str) -> None:
    """Let transformers' `model.generate` and servers stop where training stopped. `source`: for messages"""
    from transformers import GenerationConfig

    there = (folder / "generation_config.json").is_file()
    with reading(source):
        config = GenerationConfig.from_pretrained(folder) if there else GenerationConfig()
    own = config.eos_token_id
    known = own if isinstance(own, list) else [] if own is None else [own]
    ids = [*known, *(i for i in record.stop_ids if i not in known)]
    if ids:
        config.eos_token_id = ids if len(ids) > 1 else ids[0]
    config.save_pretrained(folder)


def card_of(folder: Path, record: Record, name: str, base: str | None) -> Card:
    """The card of a checkpoint; if it lies in a run's folder, with the run's recipe and evaluation."""
    run = folder.parent.parent
    recipe = run / "recipe.yaml"
    in_run = folder.parent.name == "checkpoints" and recipe.is_file()
    lines = read_lines(run / "metrics.jsonl") if in_run else []
    found = [line for line in lines if line.get("step") == record.step and "eval/dense/accuracy" in line]
    text = text_without_folders(recipe.read_text(encoding="utf-8")) if in_run else None
    return Card(name, record, text, found[-1] if found else None, base)


def push(folder: Path, hub_id: str) -> str:
    """Upload an exported folder to the hub; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(hub_id, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:  # httpx, hub and validation errors have no common class
        raise SparseRLError(
            f"{folder} was written, but could not be pushed to {hub_id!r} ({first_line(error)}); log in with `hf auth "
            f"login`, check that the hub can be reached, and push it with: hf upload {hub_id} {folder}"
        ) from error
    return str(repository)
