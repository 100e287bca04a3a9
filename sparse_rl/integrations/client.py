"""Trajectories from a server, and new weights for it: a trainer that runs elsewhere gets tokens, log-probs and traces,
replays them, and sends what it learned.

    client = RolloutClient("http://127.0.0.1:8000", key="...")
    trajectories = client.generate([[5, 9, 7]], group_size=4, max_tokens=256, temperature=1.0, seed=0)

    with WeightSender(["http://127.0.0.1:8000"], key="the admin key") as sender:
        sender.send(model, version=20)

Trajectories are those that `Engine.generate` would have given, but for beacons, which a server does not send.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import Trace
from ..distributed.broadcast import Broadcast
from ..errors import SparseRLError
from ..models.arriving import LEARNED
from ..models.companion import companions_of
from ..records import Trajectory

PART = 512 * 2**20  # bytes of weights that a request announces


class _Server:
    """Asks a server, and says in a sentence what went wrong."""

    def __init__(self, address: str, key: str | None, timeout: float):
        try:
            import httpx
        except ImportError as error:
            raise SparseRLError(
                "asking a server needs httpx: install the extra with `pip install 'sparse-rl[serve]'`."
            ) from error
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.failures = (httpx.HTTPError, httpx.InvalidURL, ValueError)
        self.http = httpx.Client(base_url=address, headers=headers, timeout=timeout)
        self.timeout = timeout

    def ask(self, method: str, path: str, **given: Any) -> Any:
        """A server whose queue is full is asked again, as it says, until the timeout."""
        end = time.monotonic() + self.timeout
        while True:
            try:
                answer = self.http.request(method, path, **given)
                if answer.status_code == 200:
                    return answer
                pause = _seconds(answer.headers.get("Retry-After", "1"))
                why = answer.json()["error"]["message"] if "json" in answer.headers.get("content-type", "") else ""
            except (*self.failures, KeyError, TypeError) as error:
                raise SparseRLError(
                    f"{self.http.base_url} does not answer ({type(error).__name__}: {error})."
                ) from error
            if answer.status_code != 429 or time.monotonic() + pause > end:
                raise SparseRLError(f"{path} was refused ({answer.status_code}): {why}")
            time.sleep(pause)


def _seconds(text: str) -> float:
    return min(float(text), 60.0) if text.isdecimal() else 1.0


class RolloutClient:
    def __init__(self, address: str, key: str | None = None, model: str | None = None, timeout: float = 600.0):
        """model: as the server calls it; None: its first one"""
        self._server = _Server(address, key, timeout)
        self.model = model

    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int = 1, at_once: int = 64, **sampling: Any
    ) -> list[Trajectory]:
        """`group_size` completions of every prompt, in order. sampling: max_tokens, temperature, seed, ...

        Leave top_p and top_k out where trajectories are replayed: a learner elsewhere does not know what they cut off.
        """
        pool = ThreadPoolExecutor(min(at_once, len(prompts)) or 1)
        try:
            asked = [pool.submit(self._group, i, list(p), group_size, sampling) for i, p in enumerate(prompts)]
            return [trajectory for group in asked for trajectory in group.result()]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error nobody waits for what has not begun

    def _group(self, index: int, prompt: list[int], size: int, sampling: dict[str, Any]) -> list[Trajectory]:
        body = {"token_ids": prompt, "model": self.model, "trace": True, "sampling_params": {**sampling, "n": size}}
        answer = self._server.ask("POST", "/inference/v1/generate", json=body).json()
        return [
            self._trajectory(index, prompt, choice, answer["weight_version"])
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def _trajectory(self, index: int, prompt: list[int], choice: dict[str, Any], version: int) -> Trajectory:
        tokens = torch.tensor(prompt + choice["token_ids"])
        trace = Trace.from_bytes(self._server.ask("GET", f"/v1/traces/{choice['trace_id']}").content)
        if trace.num_tokens != len(tokens):
            raise SparseRLError(
                f"the server sent {len(tokens)} tokens but a trace of {trace.num_tokens}, as models with beacons do, "
                "and such trajectories cannot be replayed here; serve a model without beacons."
            )
        logprobs = torch.zeros(len(tokens))
        logprobs[len(prompt) :] = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        return Trajectory(
            tokens, len(prompt), logprobs, trace, choice["finish_reason"], index, choice["index"], version
        )

    def close(self) -> None:
        self._server.http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WeightSender:
    """Sends weights to servers of the same model through a process group of gloo, in which this process is the first.

    They go through host memory, while the servers answer; each server takes them between two rounds, all of them or
    none. After an error the group has ended: make another sender.
    """

    def __init__(self, addresses: Sequence[str], key: str, host: str = "127.0.0.1", port: int = 0, timeout=300.0):
        """host, port: where the servers find this process (0: any free port); timeout: seconds that a part may take"""
        if not addresses:
            raise SparseRLError("there is no server to send weights to; give the address of at least one.")
        self._servers = [_Server(address, key, timeout + 30) for address in addresses]
        self._pool = ThreadPoolExecutor(len(addresses))
        try:
            self._all("GET", "/is_paused")  # before anybody waits for anybody
            self._group = Broadcast.sender(host, len(addresses) + 1, timeout, port)
            about = {"master_address": host, "master_port": self._group.port, "world_size": len(addresses) + 1}
            joining = [
                self._ask(
                    i, "/init_weight_transfer_engine", init_info={**about, "rank_offset": i + 1, "timeout": timeout}
                )
                for i in range(len(addresses))
            ]
            self._together(self._group.join, joining)
        except BaseException:
            self.close()
            raise

    def send(self, weights: nn.Module | Iterable[tuple[str, Tensor]], version: int | None = None) -> None:
        """weights: a model, or names and tensors, under the names of the served model; version: None: one more"""
        self._all("POST", "/start_weight_update")
        for part in _parts(named(weights) if isinstance(weights, nn.Module) else weights):
            info = {
                "names": [name for name, _ in part],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                "shapes": [list(tensor.shape) for _, tensor in part],
            }
            asked = [self._ask(i, "/update_weights", update_info=info) for i in range(len(self._servers))]
            self._together(lambda part=part: [self._group.send(tensor) for _, tensor in part], asked)
        self._all("POST", "/finish_weight_update", json={} if version is None else {"weight_version": version})

    def _all(self, method: str, path: str, **given: Any) -> None:
        for asked in [self._pool.submit(server.ask, method, path, **given) for server in self._servers]:
            asked.result()

    def _ask(self, server: int, path: str, **body: Any) -> Future:
        return self._pool.submit(self._servers[server].ask, "POST", path, json=body)

    def _together(self, work: Any, asked: list[Future]) -> None:
        """Our part of what servers were asked for. What they say about an error is said first: they know the reason."""
        failed = None
        try:
            work()
        except SparseRLError as error:
            self._group.close()
            failed = error
        for answer in asked:
            answer.result()
        if failed is not None:
            raise failed

    def close(self) -> None:
        self._pool.shutdown()
        for server in self._servers:
            server.http.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model, and what a compressor learns beside it."""
    yield from model.named_parameters()
    learned = companions_of(model).get(LEARNED)
    yield from () if learned is None else ((f"{LEARNED}:{name}", tensor) for name, tensor in learned.tensors.items())


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    part, size = [], 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > PART:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part
