"""Trajectories from a server: a trainer that runs elsewhere gets tokens, log-probs and traces, and replays them.

    client = RolloutClient("http://127.0.0.1:8000", key="...")
    trajectories = client.generate([[5, 9, 7]], group_size=4, max_tokens=256, temperature=1.0, seed=0)

They are those that `Engine.generate` would have given, but for beacons, which a server does not send.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..cache import Trace
from ..errors import SparseRLError
from ..records import Trajectory


class RolloutClient:
    def __init__(self, address: str, key: str | None = None, model: str | None = None, timeout: float = 600.0):
        """model: as the server calls it; None: its first one"""
        try:
            import httpx
        except ImportError as error:
            raise SparseRLError(
                "asking a server needs httpx: install the extra with `pip install 'sparse-rl[serve]'`."
            ) from error
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._refusals = (httpx.HTTPError, ValueError)
        self._http = httpx.Client(base_url=address, headers=headers, timeout=timeout)
        self.model = model

    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int = 1, at_once: int = 64, **sampling: Any
    ) -> list[Trajectory]:
        """`group_size` completions of every prompt, in order. sampling: max_tokens, temperature, top_p, seed, ..."""
        with ThreadPoolExecutor(min(at_once, len(prompts)) or 1) as pool:
            asked = [pool.submit(self._group, i, list(p), group_size, sampling) for i, p in enumerate(prompts)]
            return [trajectory for group in asked for trajectory in group.result()]

    def _group(self, index: int, prompt: list[int], size: int, sampling: dict[str, Any]) -> list[Trajectory]:
        body = {"token_ids": prompt, "model": self.model, "trace": True, "sampling_params": {**sampling, "n": size}}
        answer = self._ask("POST", "/inference/v1/generate", json=body).json()
        return [
            self._trajectory(index, prompt, choice, answer["weight_version"])
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def _trajectory(self, index: int, prompt: list[int], choice: dict[str, Any], version: int) -> Trajectory:
        tokens = torch.tensor(prompt + choice["token_ids"])
        trace = Trace.from_bytes(self._ask("GET", f"/v1/traces/{choice['trace_id']}").content)
        if trace.num_tokens != len(tokens):
            raise SparseRLError(
                f"the server sent {len(tokens)} tokens with a trace of {trace.num_tokens}; a model with beacons cannot "
                "be replayed from a server."
            )
        logprobs = torch.zeros(len(tokens))
        logprobs[len(prompt) :] = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        return Trajectory(
            tokens, len(prompt), logprobs, trace, choice["finish_reason"], index, choice["index"], version
        )

    def _ask(self, method: str, path: str, **given: Any) -> Any:
        try:
            answer = self._http.request(method, path, **given)
            if answer.status_code != 200:
                raise SparseRLError(f"{path} was refused ({answer.status_code}): {answer.json()['error']['message']}")
        except SparseRLError:
            raise
        except self._refusals as error:
            raise SparseRLError(f"{self._http.base_url} does not answer ({type(error).__name__}: {error}).") from error
        return answer

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
