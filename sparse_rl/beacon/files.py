"""A beacon on disk: one file beside an ordinary Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import SparseRLError
from .embedding import FILE, MARK, POSITIONS, Model, beacon_of, check_chunk, install

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_beacon(folder: Path, model: nn.Module) -> None:
    """Write the beacon beside a model that was saved there; the model's config says that there is one."""
    found = beacon_of(model)
    assert found is not None
    about = {"chunks": json.dumps(found.chunks), "position": found.position, "vocabulary": str(found.id)}
    save_file({"beacon": found.beacon.detach().cpu().contiguous()}, Path(folder) / FILE, metadata=about)


def load_beacon(source: str | Path, model: Model) -> Model:
    """Give a model the beacon of its folder or hub id, if there is one. A folder that has lost it is refused."""
    transformer = cast("PreTrainedModel", model)
    marked = getattr(transformer.config, MARK, None) is not None
    path = _find(str(source)) if marked else Path(source) / FILE
    if path is None or not path.is_file():
        if marked:
            raise SparseRLError(
                f"{source} was saved with a beacon, but its {FILE} is not there; "
                "copy it from where the model was trained."
            )
        return model
    try:
        with safe_open(path, framework="pt") as file:
            about, vector = file.metadata() or {}, file.get_tensor("beacon")
        chunks, position, vocabulary = tuple(json.loads(about["chunks"])), about["position"], int(about["vocabulary"])
        for chunk in chunks:
            check_chunk(chunk)
        if position not in POSITIONS:
            raise ValueError(f"its position is {position!r}, not one of {', '.join(POSITIONS)}")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise SparseRLError(f"{path} is damaged ({error}); copy it again from where the model was trained.") from error
    embedding = transformer.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    shape, expected = (*vector.shape, vocabulary), (embedding.embedding_dim, embedding.num_embeddings)
    if shape != expected:
        raise SparseRLError(
            f"{path} is the beacon of another model: its (width, vocabulary) is {shape}, but {source} has {expected}; "
            "copy the right one."
        )
    return install(model, vector, chunks, position)


def _find(source: str) -> Path | None:
    """Where the beacon of a folder, or of a model on the hub, is; None if there is none."""
    if Path(source).is_dir():
        return Path(source) / FILE
    from transformers.utils.hub import cached_file

    found = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def without_beacon(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict without the beacon, as the model had it before."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "beacon"}
