"""Save and load a beacon: one file beside an ordinary Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import SparseRLError
from .choice import check_choice
from .embedding import FILE, MARK, POSITIONS, Model, beacon_of, check_chunk, install

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN = ("beacon", "choice_weight", "choice_bias")  # the parameters that the file holds


def save_beacon(folder: Path, model: nn.Module) -> None:
    """Write the beacon beside the saved model, whose config says that there is one."""
    found = beacon_of(model)
    assert found is not None
    about = {"chunks": json.dumps(found.chunks), "position": found.position, "vocabulary": str(found.id)}
    if found.choice is not None:
        about["choice"] = json.dumps(found.choice)
    own = {name: parameter.detach().cpu().contiguous() for name, parameter in found.named_parameters() if name in OWN}
    save_file(own, Path(folder) / FILE, metadata=about)


def load_beacon(source: str | Path, model: Model) -> Model:
    """Give a model the beacon of its folder or hub id, if there is one; refuse a folder whose beacon file is lost."""
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
            choice: tuple[int, int] | None = tuple(json.loads(about["choice"])) if "choice" in about else None
            head = [file.get_tensor(name) for name in ("choice_weight", "choice_bias")] if choice else []
        chunks, position, vocabulary = tuple(json.loads(about["chunks"])), about["position"], int(about["vocabulary"])
        for chunk in chunks:
            check_chunk(chunk)
        if position not in POSITIONS:
            raise ValueError(f"its position is {position!r}, not one of {', '.join(POSITIONS)}")
        if choice is not None:
            check_choice(*choice)
            if [tuple(tensor.shape) for tensor in head] != [tuple(vector.shape), (1,)]:
                raise ValueError(f"its choice has the shapes {[tuple(tensor.shape) for tensor in head]}")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise SparseRLError(f"{path} is damaged ({error}); copy it again from where the model was trained.") from error
    embedding = transformer.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    shape, expected = (*vector.shape, vocabulary), (embedding.embedding_dim, embedding.num_embeddings)
    if shape != expected:
        raise SparseRLError(
            f"{path} is the beacon of another model: its (width, vocabulary) is {shape}, but {source} has {expected}; "
            "copy the one that belongs to this model."
        )
    install(model, vector, chunks, position)
    if choice is not None and (found := beacon_of(model)) is not None:
        weight, bias = (tensor.to(found.weight) for tensor in head)
        found.set_choice(weight, bias, choice)
    return model


def _find(source: str) -> Path | None:
    """The beacon file of a folder or of a model on the hub; None if there is none."""
    if Path(source).is_dir():
        return Path(source) / FILE
    from transformers.utils.hub import cached_file

    found = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def without_beacon(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict without the beacon, as the model had it before."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] not in OWN}
