"""verl's rollout server on our engine: an actor that verl's clients ask for tokens (docs/verl.md).

    verl's agent loop -> LLMServerClient.generate -> RolloutServer.generate -> an open engine, in a thread of its own
    verl's trainer    -> ServerAdapter.update_weights (verl_rollout.py) -> RolloutServer.update_weights, part by part

The methods are those that verl 0.9 calls on its vLLM server. Nothing here imports verl but the record of an answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load
from torch import nn

from ..compressors import make
from ..errors import SparseRLError, nearest, require_int
from ..models import load_model, stop_ids
from ..rollout import Engine, Sampling
from ..serve.desk import Desk, Event, Place, Ticket

KEY = "actor_rollout_ref.rollout"
PLACE = "verl"
ABORTED = "aborted"
# What a request may bring that must have no effect: vLLM has it, and our sampler does not.
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
    """`rollout.engine_kwargs.sparse_rl` of verl's configuration."""

    compressor: str = "rkv"
    budget: int = 512
    interval: int = 128
    rows: int = 256
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the compressor

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Settings:
        given = dict(engine_kwargs.get("sparse_rl") or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise SparseRLError(f"{KEY}.engine_kwargs.sparse_rl has no key {name!r}; {nearest(name, known)}")
        require_int(**{f"{KEY}.engine_kwargs.sparse_rl.rows": given.get("rows", cls.rows)})
        return cls(**given)


class RolloutServer:
    def __init__(
        self,
        config: Any,  # verl's RolloutConfig
        model: str,  # a folder or a name
        replica_rank: int,
        shares: bool,  # whether the trainer has the same GPU, and asks for its memory (verl's hybrid mode)
        devices: str | None = None,  # those that are visible; None: as they are
    ):
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self.config, self.replica_rank = config, replica_rank
        self.settings = Settings.of(config.engine_kwargs)
        self.model, self.tokenizer = load_model(model, config.dtype)
        self.device = next(self.model.parameters()).device
        self.max_tokens = config.max_model_len or config.prompt_length + config.response_length
        self.global_steps: int | None = None
        self.frees = bool(config.free_cache_engine) and shares
        self.desk: Desk | None = None
        self._running: list[tuple[str, Ticket]] = []  # verl may use an id twice
        self._arrived: set[int] = set()  # parameters of an update that goes on, by identity
        self._rejects = self._warned = False
        self._admits = asyncio.Event()  # requests are taken: not between abort and resume
        self._awake = asyncio.Event()  # there is a cache: not while the trainer has the memory
        self._admits.set()
        self._open_desk()
        self._awake.set()

    # ------------------------------------------------------------------------------------------------- answers

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """-> verl's TokenOutput. A request that arrives while the server is paused or asleep waits."""
        if any(data is not None for data in (image_data, video_data, audio_data)) or mm_processor_kwargs:
            raise SparseRLError("a request brings images, video or audio, which sparse rollouts do not support.")
        prompt = [int(token) for token in prompt_ids]
        sampling, strings, seed, wants_logprobs = self.sampling_of(sampling_params, len(prompt), request_id)
        while not (self._admits.is_set() and self._awake.is_set()):
            if self._rejects:
                return self._answer([], None, ABORTED)
            await self._admits.wait()
            await self._awake.wait()
        assert self.desk is not None
        ticket = self.desk.submit(PLACE, prompt, sampling, seed, 0, strings)
        self._running.append(entry := (request_id, ticket))
        tokens, logprobs, reason = [], [], "completed"
        try:
            async for event in self.desk.events(ticket):
                tokens += event.tokens
                logprobs += event.logprobs
                reason = ABORTED if event.finish_reason == ABORTED else reason
        finally:
            self._running.remove(entry)
        return self._answer(tokens, logprobs if wants_logprobs else None, reason)

    def _answer(self, tokens: list[int], logprobs: list[float] | None, reason: str) -> Any:
        from verl.workers.rollout.replica import TokenOutput  # pyright: ignore[reportMissingImports]

        extra = {"global_steps": self.global_steps}
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason=reason, extra_fields=extra)

    def sampling_of(
        self, asked: Mapping[str, Any], prompt_tokens: int, request_id: str
    ) -> tuple[Sampling, list[str], int, bool]:
        """(settings, stop strings, seed, whether log-probs are wanted) of a request in vLLM's words."""
        asked = dict(asked)
        room = self.max_tokens - prompt_tokens
        if room < 1:
            raise SparseRLError(
                f"the prompt has {prompt_tokens} tokens, and a prompt with its answer at most {self.max_tokens}; "
                f"raise {KEY}.max_model_len, or shorten prompts."
            )
        config = self.config
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
        limits = [asked.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        limit = next((limit for limit in limits if limit is not None), default)
        top_k, top_p = asked.pop("top_k", -1), float(asked.pop("top_p", 1.0))
        strings = asked.pop("stop", None) or []
        stops = set(stop_ids(self.model, self.tokenizer)) if not asked.pop("ignore_eos", config.ignore_eos) else set()
        stops |= set(asked.pop("stop_token_ids", None) or [])
        logprobs = asked.pop("logprobs", False)
        seed, chosen = asked.pop("seed", None), asked.pop("temperature", 1.0)
        for name, neutral in NEUTRAL.items():
            if (value := asked.pop(name, None)) not in (None, neutral):
                raise SparseRLError(f"{name} is {value}, which sparse rollouts do not have; leave it at {neutral}.")
        if asked:
            raise SparseRLError(f"a request brings {sorted(asked)[0]!r}, which sparse rollouts do not know; omit it.")
        if not self._warned and chosen > 0 and (top_k > 0 or top_p < 1):
            self._warned = True
            log.warning(
                f"top_k {top_k} and top_p {top_p}: log-probs are those of the tokens that are kept, and verl's learner "
                "does not renormalise over them; use -1 and 1 while training."
            )
        sampling = Sampling(
            max_new_tokens=max(1, min(int(limit), room)),
            temperature=float(chosen),
            top_k=max(0, int(top_k)),
            top_p=top_p,
            stop_ids=tuple(sorted(stops)),
        )
        strings = [strings] if isinstance(strings, str) else list(strings)
        return sampling, strings, self._seed_of(seed, request_id), logprobs is not None and logprobs is not False

    def _seed_of(self, seed: int | None, request_id: str) -> int:
        """A seed of its own for every request: verl asks for the members of a group by requests that are alike."""
        words = f"{self.config.seed} {self.replica_rank if seed is None else seed} {request_id}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")

    # -------------------------------------------------------------------------------------- pauses and memory

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all answers with what they have, and take no more until `resume_generation`."""
        self._admits.clear()
        self._rejects = reject_request
        names = [self._abort(*entry) for entry in self._running]
        return {"aborted_count": len(names), "request_ids": names}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        found = [self._abort(*entry) for entry in self._running if entry[0] == request_id]
        return {"aborted": bool(found), "request_id": request_id}

    def _abort(self, request_id: str, ticket: Ticket) -> str:
        if self.desk is not None:
            self.desk.cancel(ticket)
        ticket.events.put_nowait(Event([], [], ABORTED))
        return request_id

    async def resume_generation(self) -> None:
        self._rejects = False
        self._admits.set()

    async def wait_for_requests_to_drain(self) -> None:
        while self._running:
            await asyncio.sleep(0.01)

    async def sleep(self) -> None:
        """Give cache and weights back to the trainer's GPU; answers that run are waited for."""
        if not self.frees or self.desk is None:
            return
        self._awake.clear()
        await self.wait_for_requests_to_drain()
        await asyncio.to_thread(self.desk.stop)
        self.desk = None
        self._move("cpu")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """tags: `weights`, `kv_cache`; None: both"""
        if self.desk is not None:
            return
        self._move(self.device)
        if tags is None or "kv_cache" in tags:
            await asyncio.to_thread(self._open_desk)
            self._awake.set()

    async def release_kv_cache(self) -> None:
        await self.sleep()
        await self.wake_up(["weights"])

    async def resume_kv_cache(self) -> None:
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Nothing is kept of prompts that were answered."""

    def _move(self, device: Any) -> None:
        self.model.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _open_desk(self) -> None:
        settings = self.settings
        compressor = make(settings.compressor, **settings.options)
        engine = Engine(self.model, compressor, settings.budget, settings.interval, settings.rows, self.max_tokens)
        engine.version = self.global_steps or 0

        def open_engine(engine: Engine) -> Any:
            waiting = max(1000, self.config.max_num_seqs)  # verl's clients have no more requests than this
            sizes = {"prompt_tokens": self.max_tokens - 1, "max_tokens": self.max_tokens}
            return engine.open(**sizes, waiting=waiting, hold=0, park=0, tokenizer=self.tokenizer)

        self.desk = Desk({PLACE: Place(engine, open_engine)})
        self.desk.start()

    # ------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, part: bytes, last: bool) -> None:
        """Copy a part of the weights (safetensors) into the model, between two rounds. All must come in the end."""

        def job() -> None:
            copy_weights(self.model, part, self._arrived)

        try:
            await (self.desk.work(job) if self.desk is not None else asyncio.to_thread(job))
            if not last:
                return
            missing = [name for name, own in self.model.named_parameters() if id(own) not in self._arrived]
            if missing:
                raise SparseRLError(f"{len(missing)} weights did not come, such as {missing[0]}; check verl's model.")
        except BaseException:
            self._arrived.clear()
            raise
        self._arrived.clear()

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps
        if self.desk is not None:
            self.desk.places[PLACE].engine.version = global_steps

    # -------------------------------------------------------------------------------------------------- others

    async def get_rollout_config(self) -> Any:
        return self.config

    async def start_profile(self, **_: Any) -> None:
        """verl's profiler has no part here."""

    async def stop_profile(self) -> None:
        """The same."""


@torch.no_grad()
def copy_weights(model: nn.Module, part: bytes, arrived: set[int]) -> None:
    """In place, so that captured steps stay; notes the parameters that came. All of a part fit, or none is copied."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    tensors = load(part)
    for name, tensor in tensors.items():
        if name not in own:
            raise SparseRLError(f"verl sends {name!r:.100}, which the model does not have.")
        if tensor.shape != own[name].shape:
            raise SparseRLError(f"{name} has shape {list(tensor.shape)} in verl, but {list(own[name].shape)} here.")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
        arrived.add(id(own[name]))
