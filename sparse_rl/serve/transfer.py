"""Receive new weights through a process group: a trainer sends them to servers without a shared file system.

    POST /init_weight_transfer_engine  {"init_info": {"master_address", "master_port", "rank_offset", "world_size"}}
    POST /start_weight_update
    POST /update_weights               {"update_info": {"names", "dtype_names", "shapes"}}, as often as there are parts
    POST /finish_weight_update         {"weight_version": 20}

Routes and fields are those of vLLM; the group is ours (distributed/broadcast.py): the trainer is rank 0, and this
server joins as `rank_offset`. Tensors come in the order of their names and are kept in host memory while answers
continue; at the end of the update, between two rounds, they become the model's weights. If one of them does not fit,
nothing is changed. After an error the server leaves the group, so that no trainer waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from ..distributed.broadcast import Broadcast
from ..errors import SparseRLError
from .desk import Desk
from .protocol import Refusal, parsed
from .weights import Update, new_version

if TYPE_CHECKING:
    from .service import Service

Result = TypeVar("Result")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16,
          torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)}  # fmt: skip
MOST_SECONDS = 3600.0


class InitInfo(BaseModel):
    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2, le=65536)
    timeout: float = Field(300.0, ge=1.0, le=MOST_SECONDS)  # ours: seconds that any part may take
    packed: bool = False


class UpdateInfo(BaseModel):
    names: list[str] = Field(min_length=1, max_length=100_000)
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False


class Transfer:
    """The transfer of weights. Requests are handled one after the other: a second one waits for the first."""

    def __init__(self, service: Service):
        self.service = service
        self.group: Broadcast | None = None
        self.update: Update | None = None  # None: no update has begun
        self.tensors: dict[str, Tensor] = {}  # what has come of it
        self.lock = asyncio.Lock()

    async def join(self, data: Any) -> dict[str, Any]:
        info = parsed(InitInfo, _object(data, "init_info"))
        _check_packed(info.packed)
        if info.rank_offset >= info.world_size:
            raise Refusal(400, f"rank_offset is {info.rank_offset}, but world_size {info.world_size}.")
        address, patience = (info.master_address, info.master_port), info.timeout

        def joined() -> Broadcast:
            group = Broadcast.receiver(*address, info.rank_offset, info.world_size, patience)
            group.join()
            return group

        async with self.lock:
            self.leave()
            self.group = await self._try(joined)
        return {"message": "the server is in the group.", "world_size": 1}

    async def start(self) -> dict[str, Any]:
        async with self.lock:
            self._joined()
            self.update, self.tensors = Update(self.service.model), {}
        return {"message": "an update has begun."}

    async def receive(self, data: Any) -> dict[str, Any]:
        async with self.lock:
            group = self._joined()
            try:
                info = parsed(UpdateInfo, _object(data, "update_info"))
                _check_packed(info.packed)
                if self.update is None:
                    raise Refusal(400, "no update has begun; ask /start_weight_update first.")
                expected = _expected(info, self.update, self.tensors)
            except (Refusal, SparseRLError) as error:
                self.leave()
                raise error if isinstance(error, Refusal) else Refusal(400, str(error)) from error

            def received() -> dict[str, Tensor]:
                found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in expected.items()}
                for tensor in found.values():
                    group.receive_into(tensor)
                return found

            self.tensors |= await self._try(received)
        return {"message": f"{len(expected)} tensors have come."}

    async def finish(self, version: int | None) -> dict[str, Any]:
        async with self.lock:
            update, tensors = self.update, self.tensors
            if update is None:
                raise Refusal(400, "no update has begun; ask /start_weight_update first.")
            self.update, self.tensors = None, {}

            def put() -> dict[str, Any]:
                for name, tensor in tensors.items():
                    update.put(name, tensor)
                return new_version(self.service, version, update)

            try:
                update.check_whole()
                return await self.service.desk.work(put)
            except SparseRLError as error:
                raise Refusal(400, str(error)) from error

    def leave(self) -> None:
        """Leave the group: who still sends to it is told that the connection is closed."""
        if self.group is not None:
            self.group.close()
        self.group, self.update, self.tensors = None, None, {}

    def _joined(self) -> Broadcast:
        if self.group is None:
            raise Refusal(400, "the server is in no group; ask /init_weight_transfer_engine first.")
        return self.group

    async def _try(self, job: Callable[[], Result]) -> Result:
        try:
            return await _in_thread(job, self.service.desk)
        except SparseRLError as error:
            self.leave()
            raise Refusal(400, str(error)) from error


def _expected(info: UpdateInfo, update: Update, come: dict[str, Tensor]) -> dict[str, tuple[list[int], torch.dtype]]:
    """By name; nothing is received that does not fit, so what waits in memory is no larger than the model."""
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise Refusal(400, "names, dtype_names and shapes are not of equal length.", param="update_info")
    found: dict[str, tuple[list[int], torch.dtype]] = {}
    for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        if dtype not in DTYPES:
            raise Refusal(400, f"{dtype[:40]!r} is not one of {', '.join(DTYPES)}.", param="dtype_names")
        if name in come or name in found:
            raise Refusal(400, f"{name[:100]!r} comes twice in one update.", param="names")
        update.expect(name, shape, "update_info")
        found[name] = shape, DTYPES[dtype]
    return found


def _check_packed(packed: bool) -> None:
    if packed:
        raise Refusal(400, "packed transfers are not supported; send every tensor by itself.", param="packed")


def _object(data: Any, field: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(field), dict):
        raise Refusal(400, f"the body has no {field}.", param=field)
    return data[field]


async def _in_thread(job: Callable[[], Result], desk: Desk) -> Result:
    """In a thread that does not keep the server from ending; who waits is told when it ends."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    while not (await asyncio.wait({waiting}, timeout=0.5))[0]:
        if desk.stopping:
            raise Refusal(503, "the server is stopping.", "server_error")
    return waiting.result()
