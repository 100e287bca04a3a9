"""Read model folders that may be truncated, half copied or edited: checks before and after transformers reads one, and
one sentence for anything that it raises.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import SparseRLError
from .shape import weight_bytes

MOST_LAYERS = 10_000  # configs list the kind of every layer, so that an absurd number would never end
MOST_PER_BYTE = 16  # parameters per byte of a folder; the tightest quantisations have about 4
NAMED = 5  # tensors that a message names
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


@contextmanager
def reading(name: str, others: str = "give a hub id, a folder, a .gguf file, or `tiny`.") -> Iterator[None]:
    """Let transformers read a model silently, and turn anything that it raises about the files into one sentence.

    `others`: the remedy if there are no such files
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its report on tensors fills a screen; `check_tensors` says it in a sentence
    try:
        with no_progress_bar():
            yield
    except (SparseRLError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged files lead to errors of any type
        why = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            raise SparseRLError(
                f"{name!r} needs the Python code in its folder, which is never run; use another model."
            ) from error
        damaged = Path(name).exists() and not isinstance(error, ImportError)
        again = "its files are damaged or do not belong together: copy them again, or give another model."
        raise SparseRLError(f"cannot load {name!r} ({why}); {again if damaged else others}") from error
    finally:
        logging.set_verbosity(level)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers reads and writes files without a progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, which may be a stranger's."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise SparseRLError(f"{path} is not JSON ({error}); copy it again from where the model comes.") from error
    if not isinstance(values, dict):
        raise SparseRLError(f"{path} holds {type(values).__name__}, not an object with keys; copy it again.")
    return values


def check_layers(source: str) -> None:
    """Refuse a config.json that is not an object, or whose number of layers is absurd. `source`: it, or its folder."""
    path = Path(source) if source.endswith(".json") else Path(source) / "config.json"
    if not path.is_file():
        return
    config = read_object(path)
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        for key in _LAYERS:
            value = part.get(key)
            if isinstance(value, int) and not 1 <= value <= MOST_LAYERS:
                raise SparseRLError(f"{path}: {key} is {str(value)[:30]}; it must be between 1 and {MOST_LAYERS:,}.")


def check_size(folder: str, kind: Any = None) -> None:
    """Refuse a folder whose files are too small for the model of its config, before memory is allocated for it.

    `kind`: transformers' class that makes it; None: the one for language models.
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        return
    size = sum(file.stat().st_size for file in Path(folder).iterdir() if file.is_file())
    parameters = weight_bytes(AutoConfig.from_pretrained(folder, trust_remote_code=False), torch.int8, kind)
    if parameters > MOST_PER_BYTE * size:
        raise SparseRLError(
            f"the config of {folder} describes {parameters:,} parameters, but all of its files have {size:,} bytes; "
            "copy the weights again, or repair its config.json."
        )


def check_tensors(name: str, info: Mapping[str, Any]) -> None:
    """Refuse a model with tensors that its files lack or have in another shape, because these would be random.

    `info`: the loading info of transformers, which exempts tied heads and computed buffers
    """
    missing = sorted(info["missing_keys"])
    other = [f"{key} is {list(there)}, not {list(wanted)}" for key, there, wanted in sorted(info["mismatched_keys"])]
    if missing:
        raise SparseRLError(
            f"{name} has no weights for {len(missing)} of its model's tensors ({_some(missing)}); copy the weights "
            "again, or use the config.json that belongs to them."
        )
    if other:
        raise SparseRLError(
            f"{name} has {len(other)} tensors whose shape differs from its config.json ({_some(other)}); use the "
            "config.json that belongs to the weights."
        )
    if unused := sorted(info["unexpected_keys"]):
        warnings.warn(
            f"{name} has {len(unused)} tensors that its config.json has no place for: {_some(unused)}.", stacklevel=3
        )


def _some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
