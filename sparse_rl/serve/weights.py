"""New weights for a server that runs: from a folder under --weights-root, between two rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import SparseRLError
from .protocol import Refusal

if TYPE_CHECKING:
    from .service import Service


def wanted(data: Any, root: Path | None) -> tuple[Path, int | None]:
    """(folder, version) that a request names; nothing outside the root is looked at."""
    if root is None:
        raise Refusal(403, "the server was started without --weights-root.", "permission_error")
    name = data.get("weight_dir") if isinstance(data, dict) else None
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 1000:
        raise Refusal(400, "weight_dir is not the name of a folder.", param="weight_dir")
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise Refusal(400, "version is not a whole number from 0 on.", param="version")
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


def update(service: Service, folder: Path, version: int | None) -> dict[str, Any]:
    """Copy the folder's safetensors into the model, in place. All of them fit, or nothing is changed.

    Answers that run go on, on slots of the older weights; their `weight_version` is that of the oldest.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SparseRLError("the folder holds no .safetensors; write the model there with save_pretrained.")
    own = {**dict(service.model.named_parameters()), **dict(service.model.named_buffers())}
    places: dict[str, Path] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (not a dict)
                    if name not in own:
                        raise SparseRLError(f"{file.name} holds {name!r:.100}, which the model does not have.")
                    shape = tuple(content.get_slice(name).get_shape())
                    if shape != tuple(own[name].shape):
                        raise SparseRLError(f"{name} has shape {shape} there, but {tuple(own[name].shape)} here.")
                    places[name] = file
        missing = [n for n, p in service.model.named_parameters() if n not in places]
        if missing:
            raise SparseRLError(f"{len(missing)} weights are missing there, such as {missing[0]}.")
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt") as content:
                    for name in content.keys():  # noqa: SIM118
                        own[name].copy_(content.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise SparseRLError(f"the weights cannot be read ({str(error)[:200]}).") from error
    for place in service.desk.places.values():
        place.engine.version = place.engine.version + 1 if version is None else version
    return {"version": next(iter(service.desk.places.values())).engine.version, "tensors": len(places)}
