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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..compressors import make
from ..errors import SparseRLError, nearest, require_int
from ..models import load_model, stop_ids
from ..models.support import context_of
from ..rollout import Engine, Sampling
from ..serve.desk import Desk, Event, Place, Ticket
from ..serve.protocol import Refusal
from .verl_weights import Arrived, copy_weights, missing

KEY = "actor_rollout_ref.rollout"
PLACE = "verl"
ABORTED = "aborted"
# What a request may bring that must have no effect: vLLM has it, and our sampler does not.
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}
# What verl's configuration may hold, and vLLM does, that would change answers: only this is accepted.
ONLY = {
    "quantization": None,
    "enable_rollout_routing_replay": False,
    "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
}
# Calls that Ray makes of a server at a time: replica.py's max_concurrency. All may be requests that wait for a row.
CALLS = 1000, 16
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
        return cls(**{name: value for name, value in given.items() if value is not None})


def check_config(config: Any) -> None:
    """Refuse settings of verl's RolloutConfig that its other servers follow and ours would ignore."""
    for name, only in ONLY.items():
        if (value := getattr(config, name, only)) != only:
            raise SparseRLError(f"{KEY}.{name} is {value}, which sparse rollouts do not support; leave it at {only}.")
    mtp = getattr(config, "mtp", None)
    if mtp is not None and mtp.enable and mtp.enable_rollout:
        raise SparseRLError(
            f"{KEY}.mtp.enable_rollout is True, but sparse rollouts do not draft tokens; set it to False."
        )


@contextmanager
def plainly() -> Iterator[None]:
    """What the desk refuses, as an error that Ray can carry to verl: a Refusal does not survive pickle."""
    try:
        yield
    except Refusal as error:
        raise SparseRLError(error.message) from error


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
        check_config(config)
        self.model, self.tokenizer = load_model(model, config.dtype)
        self.device = next(self.model.parameters()).device
        self.max_tokens = config.max_model_len or config.prompt_length + config.response_length
        shape: Any = self.model.config
        if (context := context_of(shape.get_text_config())) is not None and self.max_tokens > context:
            raise SparseRLError(
                f"{KEY} allows {self.max_tokens} tokens for a prompt with its answer, but the model has {context} "
                "positions; lower max_model_len, or prompt_length and response_length."
            )
        self.global_steps: int | None = None
        self.frees = bool(config.free_cache_engine) and shares
        self.desk: Desk | None = None
        self._running: list[tuple[str, Ticket]] = []  # verl may use an id twice
        self._arrived: Arrived = {}  # of an update that goes on
        self._warned = False
        self._admits = True  # requests are taken: not between abort and resume
        self._rejects = False  # those that come between them are sent away, else they wait
        self._awake = True  # there is a cache: not while the trainer has the memory
        self._gate = asyncio.Condition()  # tells whoever waits that one of the three has changed
        self._memory = asyncio.Lock()  # one of sleep, wake_up and update_weights at a time
        self.desk = self._opened()

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
        async with self._gate:
            await self._gate.wait_for(lambda: self._rejects or (self._admits and self._awake))
        if self._rejects:
            return self._answer([], None, ABORTED)
        assert self.desk is not None
        tokens, logprobs, reason = [], [], "completed"
        with plainly():
            ticket = self.desk.submit(PLACE, prompt, sampling, seed, 0, strings)
            self._running.append(entry := (request_id, ticket))
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
        asked = {name: value for name, value in asked.items() if value is not None}
        room = self.max_tokens - prompt_tokens
        if room < 1:
            raise SparseRLError(
                f"the prompt has {prompt_tokens} tokens, but a prompt with its answer may have {self.max_tokens}; "
                f"raise {KEY}.max_model_len, or shorten prompts."
            )
        config = self.config
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
        limits = [asked.pop(name) for name in ("max_tokens", "max_new_tokens") if name in asked]
        limit = (limits or [default])[0]
        top_k, top_p = asked.pop("top_k", -1), float(asked.pop("top_p", 1.0))
        strings = asked.pop("stop", [])
        stops = set(stop_ids(self.model, self.tokenizer)) if not asked.pop("ignore_eos", config.ignore_eos) else set()
        stops |= set(asked.pop("stop_token_ids", []))
        logprobs = asked.pop("logprobs", False)
        seed, chosen = asked.pop("seed", None), asked.pop("temperature", 1.0)
        asked.setdefault("repetition_penalty", getattr(config, "repetition_penalty", 1.0))
        for name, neutral in NEUTRAL.items():
            if (value := asked.pop(name, neutral)) != neutral:
                raise SparseRLError(f"{name} is {value}, which sparse rollouts do not support; leave it at {neutral}.")
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
        await self._turn(_admits=False, _rejects=reject_request)
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
        await self._turn(_admits=True, _rejects=False)

    async def _turn(self, **to: bool) -> None:
        async with self._gate:
            for name, value in to.items():
                setattr(self, name, value)
            self._gate.notify_all()

    async def wait_for_requests_to_drain(self) -> None:
        while self._running:
            await asyncio.sleep(0.01)

    async def sleep(self) -> None:
        """Give cache and weights back to the trainer's GPU; answers that run are waited for."""
        if not self.frees:
            return
        async with self._memory:
            await self._turn(_awake=False)
            await self.wait_for_requests_to_drain()
            if self.desk is not None:
                await asyncio.to_thread(self.desk.stop)
                self.desk = None
            self._move("cpu")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """tags: `weights`, `kv_cache`; None: both"""
        async with self._memory:
            if self.desk is None:
                self._move(self.device)
                if tags is not None and "kv_cache" not in tags:
                    return
                self.desk = await asyncio.to_thread(self._opened)
            await self._turn(_awake=True)

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

    def _opened(self) -> Desk:
        settings = self.settings
        compressor = make(settings.compressor, **settings.options)
        engine = Engine(self.model, compressor, settings.budget, settings.interval, settings.rows, self.max_tokens)
        engine.version = self.global_steps or 0

        def open_engine(engine: Engine) -> Any:
            waiting = max(CALLS[0], self.config.max_num_seqs + CALLS[1])
            sizes = {"prompt_tokens": self.max_tokens - 1, "max_tokens": self.max_tokens}
            return engine.open(**sizes, waiting=waiting, hold=0, park=0, tokenizer=self.tokenizer)

        desk = Desk({PLACE: Place(engine, open_engine)})
        desk.start()
        return desk

    # ------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, part: bytes, last: bool) -> None:
        """Copy a part of the weights (safetensors) into the model, between two rounds. All must come in the end."""

        def job() -> None:
            copy_weights(self.model, part, self._arrived)

        try:
            async with self._memory:
                with plainly():
                    await (self.desk.work(job) if self.desk is not None else asyncio.to_thread(job))
            if not last:
                return
            if lacking := missing(self.model, self._arrived):
                raise SparseRLError(
                    f"verl did not send {len(lacking)} weights, such as {lacking[0]}; check verl's model."
                )
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
