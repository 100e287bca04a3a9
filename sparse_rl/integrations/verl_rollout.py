"""`actor_rollout_ref.rollout.name=sparse-rl`: rollouts of verl 0.9 on a compressed cache (docs/verl.md).

`Replica` starts a server (verl_server.py) beside each of verl's workers; `ServerAdapter` is the worker's side of it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import save
from verl.plugin.platform import get_platform  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_resource_name  # pyright: ignore[reportMissingImports]
from verl.utils.fs import copy_to_local  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.base import BaseRollout  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutMode, RolloutReplica  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.utils import ensure_async_iterator  # pyright: ignore[reportMissingImports]

from ..errors import SparseRLError
from .verl_server import KEY, RolloutServer


def server_name(replica_rank: int, suffix: str = "") -> str:
    return f"sparse-rl_server_{replica_rank}{suffix}"


class Replica(RolloutReplica):
    """One server: a whole model on one GPU."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise SparseRLError(
                f"a replica of {KEY} has {self.world_size} GPUs, but sparse rollouts run a whole model on each; set "
                "tensor_model_parallel_size, data_parallel_size and pipeline_model_parallel_size to 1."
            )
        if self.is_reward_model or self.is_teacher_model:
            raise SparseRLError("sparse rollouts only sample from the actor; use vllm or sglang for other models.")
        path, shm = _get(self.model_config, "path"), bool(_get(self.model_config, "use_shm"))
        node, devices, model = await self.workers[0].__ray_call__.remote(place_of, path, shm)
        never_set = {name: "1" for name in get_platform().ray_noset_envvars()}
        actor: Any = ray.remote(RolloutServer).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": {**never_set, **get_platform().rollout_env_vars()}},
            name=server_name(self.replica_rank, self.name_suffix),
            max_concurrency=self.max_concurrency,
        )
        server = actor.remote(
            config=self.config,
            model=model,
            replica_rank=self.replica_rank,
            shares=self.rollout_mode != RolloutMode.STANDALONE,
            devices=devices,
        )
        await server.get_rollout_config.remote()  # raises what its start raised
        self.servers, self._server_handle = [server], server
        self._server_address = server_name(self.replica_rank, self.name_suffix)  # a label: there is no HTTP


def place_of(_: Any, path: str, shm: bool) -> tuple[str, str | None, str]:
    """(node, visible devices, model) of the worker that runs this. What lies in HDFS is copied to the node."""
    context = ray.get_runtime_context()
    found = context.get_accelerator_ids().get(get_resource_name()) or [None]
    return context.get_node_id(), found[0], copy_to_local(path, use_shm=shm)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)


class ServerAdapter(BaseRollout):
    """In a process of verl's trainer: hands weights to the server beside it, and memory back and forth."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._found: Any = None

    @property
    def server(self) -> Any:
        """It is started after this process."""
        self._found = self._found or ray.get_actor(server_name(self.replica_rank))
        return self._found

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send (name, tensor) pairs in parts, through host memory."""
        if wire_format != "named_tensors":
            raise SparseRLError(
                f"weights come as {wire_format}, but sparse rollouts need whole tensors; choose "
                "another checkpoint_engine.backend, such as naive or nccl."
            )
        if peft_config is not None:
            raise SparseRLError("verl sends only the adapters; set actor_rollout_ref.model.lora.merge=True.")
        most = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        async for part, last in parts_of(ensure_async_iterator(weights), most):
            await self.server.update_weights.remote(part, last)
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)


async def parts_of(weights: AsyncIterator[tuple[str, torch.Tensor]], most: int) -> AsyncIterator[tuple[bytes, bool]]:
    """(safetensors, whether it is the last one): parts of at most so many bytes, or of one tensor that is larger."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    async for name, tensor in weights:
        if part and size + tensor.nbytes > most:
            yield save(part), False
            part, size = {}, 0
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()  # verl reuses its buffers
        size += tensor.nbytes
    yield save(part), True
