"""The transport over Ray: members are actors of a Ray cluster.

    ray               a new cluster on this machine, which nothing outside can reach; it ends with the run
    ray://HOST:PORT   a running cluster, by the address of its head; this machine must be one of its nodes
    ray://auto        the running cluster of which this machine is a node

Weights go through Ray's object store, once per version and node; a member on another node fetches only what changed
since the version that it has (weights.py). Results come back with the answers to polls. Ray unpickles what it receives,
so the network of a cluster must be trusted (SECURITY.md).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import SparseRLError
from ..files import first_line
from .pieces import Piece, Place
from .pool import Answered, Event, Joined, Lost
from .weights import Offer, Part, Versions
from .worker import About, Answer, Hands, Worker

POLL = 5.0  # seconds after which a member answers a poll even if nothing happened
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray gives its own processes no address but 127.0.0.1
_MINIMUM = 128 * 2**20  # bytes of an object store


class Actor:
    """The actor that runs in a member's process."""

    def __init__(self, make_hands: Callable[[], Hands]):
        self.hands = make_hands()
        self.worker = Worker(self.hands)

    def about(self) -> About:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return About(self.hands.rows, socket.gethostname(), os.getpid(), node)

    def start(self, work: Sequence[tuple[Place, Piece]], weights: Offer[Any], seconds: float) -> Answer:
        import ray

        self.worker.start(work, lambda has: (ray.get(ref) for ref in weights.refs(has)))
        return self.worker.poll(seconds)

    def poll(self, seconds: float) -> Answer:
        return self.worker.poll(seconds)

    def stop(self, handout: Place) -> None:
        self.worker.stop(handout)


class RayTransport:
    def __init__(
        self,
        address: str,
        make_hands: Callable[[], Hands],
        samplers: int,
        on_gpu: bool,
        store_bytes: int,
        processes: int = 1,
        patience: float = math.inf,
    ):
        """`samplers`: as many as are wanted, or 0; they share what the cluster has. `processes`: of the run, each of
        which has samplers of its own. `patience`: seconds of silence for which a member is given up.
        """
        self.processes, self.poll = processes, min(POLL, patience / 4)
        self.ray, self.own = connect(address, store_bytes, on_gpu)
        self.make_hands = make_hands
        self.kind = "GPU" if on_gpu and self.ray.cluster_resources().get("GPU") else "CPU"
        self.each = share_of_each(self._units(), samplers)
        self.node = self.ray.get_runtime_context().get_node_id()
        self.actors: dict[int, Any] = {}
        self.about: dict[int, About] = {}
        self.asked: dict[Any, int] = {}  # what members have not answered yet -> who
        self.weights: Versions[Any] = Versions(self._put, lambda ref: self.ray.get(ref))  # in the object store

    def _units(self) -> list[float]:
        """What samplers can share: the CPUs of each node that is there, or each of its GPUs."""
        found = [node["Resources"].get(self.kind, 0.0) for node in self.ray.nodes() if node["Alive"]]
        return found if self.kind == "CPU" else [1.0 for gpus in found for _ in range(int(gpus))]

    def room(self) -> int:
        return places(self._units(), self.each) // self.processes

    def start(self, member: int) -> None:
        needs = {"num_cpus": 0, "num_gpus": self.each} if self.kind == "GPU" else {"num_cpus": self.each}
        actor = self.ray.remote(Actor).options(max_concurrency=4, max_restarts=0, **needs).remote(self.make_hands)
        self.actors[member] = actor
        self.asked[actor.about.remote()] = member

    def hand(self, member: int, work: Sequence[tuple[Place, Piece]]) -> None:
        weights = self.weights.offer(work[0][1].version)  # a member fetches them if it has others
        self.asked[self.actors[member].start.remote(list(work), weights, self.poll)] = member

    def stop(self, member: int, handout: Place) -> None:
        self.actors[member].stop.remote(handout)

    def kill(self, member: int) -> None:
        actor, about = self.actors.pop(member), self.about.pop(member, None)
        self.asked = {ref: who for ref, who in self.asked.items() if who != member}
        self.ray.kill(actor)
        if about is not None:
            self._end_process(about)

    def _end_process(self, about: About) -> None:
        """Ray asks a process to end, and waits for one that hangs: whoever is on its node ends it."""
        if about.node == self.node:
            return kill_sampler(about.pid)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(about.node, soft=False)
        self.ray.remote(kill_sampler).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(about.pid)

    def events(self, seconds: float) -> list[Event]:
        if not self.asked:
            time.sleep(min(seconds, 0.05))
            return []
        ready, _ = self.ray.wait(list(self.asked), num_returns=1, timeout=seconds)
        if ready:  # and whatever else is there
            ready, _ = self.ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0)
        return [self._event(ref) for ref in ready]

    def _event(self, ref: Any) -> Event:
        member = self.asked.pop(ref)
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            actor = self.actors.pop(member)
            self.about.pop(member, None)
            self.ray.kill(actor)  # it may only be out of reach
            return Lost(member, why(error))
        if isinstance(answer, About):
            self.about[member] = answer
            return Joined(member, answer)
        if answer.busy:
            self.asked[self.actors[member].poll.remote(self.poll)] = member
        return Answered(member, answer)

    def publish(self, version: int, parts: Iterable[dict[str, np.ndarray]], oldest: int) -> int:
        others = any(about.node != self.node for about in list(self.about.values()))  # on this node, memory is shared
        return self.weights.publish(version, parts, oldest, compare=others)

    def _put(self, part: Part, needed: int) -> Any:
        try:
            return self.ray.put(dict(part))
        except (self.ray.exceptions.ObjectStoreFullError, self.ray.exceptions.OutOfDiskError) as error:
            raise SparseRLError(
                f"Ray's object store has no room for {needed / 2**20:,.0f} MiB of weights and more "
                f"({first_line(error)}); start the node with a larger --object-store-memory, or make room on the "
                "disk that it spills to."
            ) from error

    def close(self) -> None:
        for member in list(self.actors):
            self.kill(member)
        self.weights.kept.clear()
        if self.own:
            self.ray.shutdown()


def connect(address: str, store_bytes: int, on_gpu: bool = False) -> tuple[Any, bool]:
    """The module, connected; and whether the cluster is this run's own. on_gpu: a cluster of its own has the GPUs that
    torch sees, whatever Ray finds; a sampler without one would compute on the CPU.
    """
    local, imported = address == "ray", "ray" in sys.modules
    if local and not imported:
        os.environ.setdefault(_LOOPBACK, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise SparseRLError("rollout.pool is ray, but Ray is not installed; pip install 'sparse-rl[ray]'.") from error
    if ray.is_initialized():
        return ray, False
    if local and imported and _LOOPBACK not in os.environ:
        raise SparseRLError(
            f"rollout.pool is ray, but this process imported Ray before {_LOOPBACK} was 0: a cluster of its own would "
            "listen to the network; set that environment variable, or import Ray later."
        )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if local:
        store = max(_MINIMUM, store_bytes)
        if on_gpu:
            quiet["num_gpus"] = torch.cuda.device_count()
        try:
            with own_sigterm():
                ray.init(address="local", include_dashboard=False, object_store_memory=store, **quiet)
        except ValueError as error:
            raise SparseRLError(
                f"Ray's object store cannot have {store / 2**30:,.1f} GiB, the room for all versions of the weights "
                f"under way ({first_line(error)}); lower rollout.ahead, train adapters (model.lora_rank), or give "
                "this machine more shared memory (/dev/shm)."
            ) from error
        return ray, True
    head = address.removeprefix("ray://")
    try:
        knock(head)
        with own_sigterm():
            ray.init(address=head, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise SparseRLError(
            f"rollout.pool is {address}, but there is no cluster to join ({first_line(error)}); start its head with "
            "`ray start --head`, and on this machine `ray start --address=HOST:PORT`. A cluster that asks for a token "
            "lets nobody in who has not set RAY_AUTH_MODE=token."
        ) from error
    return ray, True


def knock(head: str) -> None:
    """Raise OSError if nobody listens there: Ray would look for minutes."""
    if head == "auto":
        return
    host, _, port = head.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Ray gives SIGTERM a handler that ends the process at once; a run has its own, which saves."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():  # Ray, too, asks where it is
            signal.signal(signal.SIGTERM, before)


def share_of_each(units: Sequence[float], samplers: int) -> float:
    """How much of a GPU, or CPU, each sampler gets: all of one, or the most with which all of them find a place. A
    sampler is in one unit: what is left of two of them is of no use.
    """
    for hundredths in range(100, 1, -1):
        if places(units, hundredths / 100) >= samplers:
            return hundredths / 100
    return 0.01


def places(units: Sequence[float], each: float) -> int:
    return sum(int(size / each + 1e-6) for size in units)


def why(error: Exception) -> str:
    """What Ray says of a member that is gone, without its ids: the first error of our own, or the first line."""
    cause = getattr(error, "cause", None)
    text = str(cause or error)
    ours = [line for line in text.splitlines() if "SparseRLError" in line or "Error:" in line]
    return ours[-1].strip() if ours else first_line(error)


def kill_sampler(pid: int) -> None:
    """End a process of this machine, if it is one of Ray's actors: its number may have been given to another."""
    try:
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
