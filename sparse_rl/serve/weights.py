"""Load new weights into a running server, between two rounds, from a folder under --weights-root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..beacon import FILE as BEACON
from ..beacon import BeaconEmbedding, beacon_of
from ..errors import SparseRLError
from ..models import companions_of
from ..models.arriving import LEARNED, Arrived, Place, missing, note, own_weights, place_of
from ..models.companion import NAMES
from .protocol import Refusal

if TYPE_CHECKING:
    from .service import Service


def wanted(data: Any, root: Path | None) -> tuple[Path, int | None]:
    """(folder, version) that a request names; nothing outside the root is looked at."""
    if root is None:
        raise Refusal(403, "the server was started without --weights-root.", "permission_error")
    name = data.get("weight_dir") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 1000:
        raise Refusal(400, "weight_dir is not the name of a folder.", param="weight_dir")
    version = version_in(data, "version")
    try:
        top = root.resolve()
        folder = (top / name).resolve()
        there = folder.is_dir()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        raise Refusal(400, "weight_dir is not the name of a folder.", param="weight_dir") from None
    if folder != top and top not in folder.parents:
        raise Refusal(403, "weight_dir is not under --weights-root.", "permission_error", param="weight_dir")
    if not there:
        raise Refusal(400, "there is no such folder under --weights-root.", param="weight_dir")
    return folder, version


def version_in(data: Any, *fields: str) -> int | None:
    """The version that a request names; as a number, or, as vLLM's clients write it, in digits."""
    found = [data[field] for field in fields if data.get(field) is not None]
    if not found:
        return None
    version = int(found[0]) if isinstance(found[0], str) and found[0].isascii() and found[0].isdecimal() else found[0]
    if type(version) is not int or not 0 <= version < 2**31:
        raise Refusal(400, f"{fields[0]} is not a whole number from 0 to 2^31 - 1.", param=fields[0])
    return version


class Update:
    """Tensors that will become the model's weights; if one of them does not fit, nothing is changed."""

    def __init__(self, model: nn.Module):
        self.model, self.own = model, own_weights(model)
        self.places: dict[str, Place] = {}
        self.arrived: Arrived = {}

    def expect(self, name: str, shape: Sequence[int], source: str) -> None:
        place = place_of(name, self.own)
        if place is None:
            raise SparseRLError(f"{source} holds {name!r:.100}, which the model does not have.")
        if tuple(shape) != tuple(place.part.shape):
            raise SparseRLError(f"{name:.100} has shape {list(shape)} there, but {list(place.part.shape)} here.")
        self.places[name] = place
        note(self.arrived, name, place)

    def check_whole(self) -> None:
        if lacking := missing(self.model, self.arrived):
            raise SparseRLError(f"{len(lacking)} weights are missing there, such as {lacking[0]}.")

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor) -> None:
        self.places[name].part.copy_(tensor)


def new_version(service: Service, version: int | None, update: Update) -> dict[str, Any]:
    """Note that all weights are there. None: one more than before"""
    for place in service.desk.places.values():
        place.engine.version = place.engine.version + 1 if version is None else version
    return {"version": service.version, "tensors": len(update.places)}


def update(service: Service, folder: Path, version: int | None) -> dict[str, Any]:
    """Copy what a folder holds into the model, in place: a model as `save_pretrained` writes it, with its beacon and
    with what a compressor has learned, where the served model has them.

    Answers that run go on, on slots of the older weights; their `weight_version` is that of the oldest.
    """
    found, new = list(files(folder, service.model)), Update(service.model)
    if not any(prefix == "" for _, prefix in found):
        raise SparseRLError("the folder holds no .safetensors of a model; write it there with save_pretrained.")
    try:
        for file, prefix in found:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (not a dict)
                    new.expect(prefix + name, content.get_slice(name).get_shape(), file.name)
        new.check_whole()
        for file, prefix in found:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118
                    new.put(prefix + name, content.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise SparseRLError(f"the weights cannot be read ({str(error)[:200]}).") from error
    return new_version(service, version, new)


def files(folder: Path, model: nn.Module) -> Iterator[tuple[Path, str]]:
    """The files of a model's folder, and what the model puts before the names in them; "": a file of the model itself.
    What was measured once (triattention) stays as it was loaded.
    """
    learned = LEARNED in companions_of(model)
    for file in sorted(folder.glob("*.safetensors")):
        if file.name == BEACON:
            yield file, beacon_place(model)
        elif file.stem not in NAMES:
            yield file, ""
        elif file.stem == LEARNED and learned:
            yield file, f"{LEARNED}:"


def beacon_place(model: nn.Module) -> str:
    if beacon_of(model) is None:
        raise SparseRLError("the folder's model has a beacon, but the one that is served has none.")
    return next(f"{name}." for name, module in model.named_modules() if isinstance(module, BeaconEmbedding))
