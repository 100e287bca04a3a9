"""The administrator's routes, under the names that prime-rl and vLLM's clients call.

/pause  /resume  /is_paused
/update_weights with weight_dir: load weights from a folder under --weights-root (weights.py)
/init_weight_transfer_engine  /start_weight_update  /update_weights with update_info  /finish_weight_update
/get_world_size: receive weights through a process group (transfer.py)
/init_broadcaster  /load_lora_adapter: refused
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from ..errors import SparseRLError
from . import weights
from .protocol import Refusal, parse_json
from .service import Service
from .transfer import Transfer


def add_admin(app: FastAPI, service: Service) -> None:
    """guard.ADMIN lists these routes: the guard asks for the key before they are reached."""
    desk, transfer = service.desk, Transfer(service)

    @app.post("/pause")
    async def pause(request: Request) -> dict[str, Any]:
        mode = request.query_params.get("mode", "keep")
        if mode != "keep":
            message = "answers that run are kept, and go on after /resume; another mode than keep is not supported."
            raise Refusal(400, message, param="mode")
        await desk.work(lambda: setattr(desk, "paused", True))
        return {"paused": True}

    @app.post("/resume")
    async def resume() -> dict[str, Any]:
        await desk.work(lambda: setattr(desk, "paused", False))
        return {"paused": False}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": desk.paused}

    @app.post("/update_weights")
    async def update_weights(request: Request) -> dict[str, Any]:
        data = parse_json(await request.body())
        if isinstance(data, dict) and "update_info" in data:
            return await transfer.receive(data)
        folder, version = weights.wanted(data, service.settings.weights_root)
        try:
            return await desk.work(lambda: weights.update(service, folder, version))
        except SparseRLError as error:
            raise Refusal(400, str(error)) from error

    @app.post("/init_weight_transfer_engine")
    async def join(request: Request) -> dict[str, Any]:
        return await transfer.join(parse_json(await request.body()))

    @app.post("/start_weight_update")
    async def start() -> dict[str, Any]:
        return await transfer.start()

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> dict[str, Any]:
        body = await request.body()
        data = parse_json(body) if body else {}
        if not isinstance(data, dict):
            raise Refusal(400, "the body is not an object.")
        return await transfer.finish(weights.version_in(data, "weight_version", "version"))

    @app.get("/get_world_size")
    async def world_size() -> dict[str, Any]:
        return {"world_size": 1}

    @app.post("/init_broadcaster")
    async def init_broadcaster() -> None:
        message = "prime-rl's broadcast is NCCL as vLLM speaks it; set weight_broadcast.type to filesystem."
        raise Refusal(400, message, code="not_supported")

    @app.post("/load_lora_adapter")
    async def load_lora_adapter() -> None:
        message = "adapters are not loaded beside the model; merge them into its weights, or train without them."
        raise Refusal(400, message, code="not_supported")
