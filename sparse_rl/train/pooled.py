"""Run a pool of samplers for a training run: start it from the recipe, send it weights, and report on it.

The run's pool.json says where its samplers are and what they have done up to the last step.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..config import Recipe
from ..distributed.world import World
from ..errors import SparseRLError
from ..files import write_text
from ..pool.cluster import RayTransport
from ..pool.pieces import own_samplers
from ..pool.pool import Pool
from ..rollout import Engine
from .ask import FromPool
from .remote import MakeHands, store_bytes, weights_of
from .step import StepRollout
from .terminal import TerminalTable
from .worker import Sampler

WRITTEN = "pool.json"


class RunPool:
    def __init__(self, recipe: Recipe, sampler: Sampler, world: World, terminal: TerminalTable):
        settings, self.sampler, self.first, self.terminal = recipe.rollout, sampler, world.first, terminal
        assert settings.pool is not None
        if sampler.chats is not None:
            raise SparseRLError(
                f"rollout.pool is {settings.pool!r}, but the task {recipe.task.name} holds conversations, which are "
                "sampled in the learner's process; leave out rollout.pool."
            )
        scores, keep = bool(settings.ahead), settings.ahead + 2
        own = share_of(settings.pool, settings.samplers, world)
        transport = RayTransport(
            settings.pool,
            MakeHands(recipe, torch.get_num_threads(), scores),
            settings.samplers,
            sampler.engine.device.type == "cuda",
            store_bytes(keep, sampler.model, sampler.critic),
            world.size,
            settings.patience,
        )
        self.pool = Pool(
            transport, own, settings.patience, settings.over_ask, keep, terminal.say, terminal.show_samplers
        )
        sampler.asks = FromPool(self.pool, sampler, scores, world.rank)

    def publish(self, version: int) -> None:
        self.pool.publish(version, lambda: weights_of(self.sampler.model, self.sampler.critic))

    def write(self, folder: Path, step: int) -> None:
        """The samplers of the first process, in place of what was written before."""
        standings = self.pool.standings()
        self.terminal.show_samplers(standings)
        if self.first:
            write_text(folder / WRITTEN, json.dumps({"step": step, **standings.to_dict()}) + "\n")

    def timing(self) -> dict[str, float]:
        """Of this process's samplers; counts are since the run was started."""
        pool, counts = self.pool, self.pool.counts
        found = {
            "pool/samplers/count": pool.live,
            "pool/joined/count": counts.joined,
            "pool/lost/count": counts.lost,
            "pool/asked_again/count": pool.ledger.asked_again,
            "pool/asked_twice/count": pool.ledger.asked_twice,
            "pool/duplicates/count": counts.duplicates,
            "pool/duplicates/different": counts.different,
            "pool/messages/count": counts.messages,
            "pool/bytes/received": counts.bytes_in,
            "pool/bytes/weights": counts.bytes_out,
            "pool/bytes/fetched": counts.bytes_fetched,
        }
        found |= {f"pool/{name}/seconds": seconds for name, seconds in dict(counts.spent).items()}
        return {name: float(value) for name, value in found.items()}


def share_of(address: str, samplers: int, world: World) -> int:
    """How many of the samplers are this process's; 0: as many as there is room for."""
    if world.size == 1:
        return samplers
    if address == "ray":
        raise SparseRLError(
            f"rollout.pool is ray, a cluster of one process, but the run has {world.size}; start a cluster, and give "
            "its address (ray://HOST:PORT)."
        )
    if 0 < samplers < world.size:
        raise SparseRLError(
            f"rollout.samplers is {samplers}, but each of {world.size} processes needs one; use at least {world.size}."
        )
    return own_samplers(samplers, world.size, world.rank)


def start_pool(recipe: Recipe, sampler: Sampler, world: World, terminal: TerminalTable) -> RunPool | None:
    """Samplers in processes of their own, where the recipe asks for them."""
    return None if recipe.rollout.pool is None else RunPool(recipe, sampler, world, terminal)


def write_samplers(pool: RunPool | None, folder: Path, step: int) -> None:
    if pool is not None:
        pool.write(folder, step)


def end_pool(pool: RunPool | None) -> None:
    if pool is not None:
        pool.pool.close()


def sampler_timing(engine: Engine, rollout: StepRollout, pool: RunPool | None) -> dict[str, float]:
    """Bytes of traces and of the rows that sampled, and what these saved: of this process's engine, or of its pool's;
    and what the pool did.
    """
    if pool is None:
        allocated = engine.cache.nbytes + engine.scratch.nbytes
        saved = engine.kv_bytes_saved(rollout.trajectories)
    else:
        held = [sampler.cache_bytes for sampler in list(pool.pool.samplers.values()) if sampler.cache_bytes]
        allocated = sum(held)
        saved = engine.kv_bytes_saved(rollout.trajectories, allocated, max(1, len(held)))
    found = {"trace/bytes/total": float(rollout.trace_bytes)}
    found |= {"cache/bytes/allocated": float(allocated), "cache/bytes_saved/frac": saved}
    return found if pool is None else found | pool.timing()
