"""The rollout engine: completions of prompts by any Hugging Face causal LM on a fixed-capacity, evicting KV cache.

The model's weights are used in place, so after an update the next rollout needs no copy and no new capture. What happens in a call is in
schedule.py, one decode step in decode.py, its capture in capture.py.

    engine = Engine(model, compressor="rkv", budget=512, interval=128, rows=64)
    trajectories = engine.generate(prompts, group_size=8, sampling=Sampling(max_new_tokens=4096), seed=0)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..attention import use_attention
from ..cache import SlotCache
from ..compressors import Compressor, make
from ..errors import NonFiniteLogits, OutOfMemory, RolloutInterrupted, SparseRLError, require_int
from ..models import ModelShape, check_model, evaluating
from ..planning.memory import (
    Plan,
    available_memory,
    cache_shape,
    default_prefill_chunk,
    is_out_of_memory,
    make_plan,
    size,
)
from ..records import Trajectory
from .capture import Decoder, addresses
from .decode import RowState, empty_trace
from .fold import beacon_positions, check_beacon
from .progress import ProgressBar
from .sampling import Sampling
from .schedule import GenerateCall, OnTokens

_DECODERS = 4  # kept with their graphs, one for each way of sampling
_USUAL_RESPONSE = 4096  # new tokens assumed when memory runs out before the first call has said how many


class Engine:
    def __init__(
        self,
        model: nn.Module,
        compressor: str | Compressor = "rkv",
        budget: int = 512,
        interval: int = 128,
        rows: int = 8,
        max_tokens: int | None = None,
        prefill_chunk: int | None = None,
        prefill_rows: int | None = None,
        poll: tuple[int, int] | None = None,
    ):
        """`max_tokens` (prompt + new) sizes rows that hold whole responses (`dense`, `prompt-only`) once and for all; otherwise they grow
        with the longest call.

        `prefill_chunk`: prompt tokens fed at a time; `prefill_rows`: prompts they may belong to; `poll`: least and most decode steps
        between two looks at the device. By default 512, 1 and (1, 1) on a CPU; 16,384, as many as that holds, and (8, 16) on a GPU.
        """
        on_gpu = next(model.parameters()).is_cuda
        prefill_chunk = default_prefill_chunk(on_gpu) if prefill_chunk is None else prefill_chunk
        self.poll = ((8, 16) if on_gpu else (1, 1)) if poll is None else poll
        require_int(rows=rows, prefill_chunk=prefill_chunk, prefill_rows=1 if prefill_rows is None else prefill_rows)
        if not (isinstance(self.poll, tuple) and len(self.poll) == 2):
            raise SparseRLError(
                f"poll is {poll!r}; it must be two whole numbers, the least and the most steps between two looks."
            )
        require_int(**{"poll[0]": self.poll[0]})
        require_int(at_least=self.poll[0], **{"poll[1]": self.poll[1]})
        if max_tokens is not None:
            require_int(at_least=2, max_tokens=max_tokens)
        check_model(model)
        self.model = model
        self.shape = ModelShape.of(model.config, next(model.parameters()).dtype)
        self.largest = self.compressor = make(compressor).bind(
            budget, interval
        )  # what rows are made for; what evicts now
        if self.compressor.folds:
            check_beacon(model, self.compressor)
        with use_attention(model, "slots"):
            pass  # refuses models whose attention cannot be replaced, before anything is allocated
        self.rows, self.max_tokens, self.prefill_chunk, self.prefill_rows = (
            rows,
            max_tokens,
            prefill_chunk,
            prefill_rows,
        )
        self.version = 0  # optimizer steps behind the weights; stamped on trajectories
        self.cache: SlotCache | None = None
        self.scratch: SlotCache | None = None
        self.state: RowState | None = None
        self.decoders: dict[tuple, Decoder] = {}  # by what a captured step has built in
        self.seconds: dict[str, float] = {}  # of the last call, by phase
        self.steps = 0  # decode steps of the last call
        self.waited = 0  # of all rows together: steps in which one was full and waited for the end of a round
        self.calls = 0  # so far; a stream is cut off by the next
        self.stopped = False  # set from another thread, it ends the call that is running as Ctrl-C would
        self.keeps_state = on_gpu  # captured steps hold the addresses of what rows write down
        if self.compressor.evicts_response:
            capacity = self.compressor.capacity(0, 0)
            new_tokens = max(1, (max_tokens or capacity + _USUAL_RESPONSE) - capacity)
            self._allocate_rows(capacity, self.plan(prompt_tokens=capacity, new_tokens=new_tokens))
        elif max_tokens is not None:
            self._allocate_rows(max_tokens, self.plan(prompt_tokens=1, new_tokens=max_tokens - 1))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def capacity(self) -> int:
        """Slots at which a row is full: all it has, unless `set_budget` asked for less."""
        return self.compressor.capacity(0, 0) if self.compressor.evicts_response else self.cache.capacity

    def set_budget(self, budget: int) -> None:
        """Keep `budget` slots at an eviction from the next call on, at most as many as the engine was made with.

        Rows stay as they are, only less of them is used; so nothing is allocated, and nothing captured, anew.
        """
        if not self.compressor.evicts or self.compressor.folds:
            name = self.compressor.name
            raise SparseRLError(
                f"{name} chooses nothing to evict, so it has no budget to set to {budget}; use another compressor."
            )
        bound = self.compressor.bind(budget, self.compressor.interval)
        if budget > self.largest.budget:
            raise SparseRLError(
                f"the budget cannot be set to {budget}: rows of this engine were made for {self.largest.budget}; "
                f"make it with Engine(..., budget={budget})."
            )
        self.compressor = bound

    def plan(self, prompt_tokens: int, new_tokens: int) -> Plan:
        """What a call with prompts of up to `prompt_tokens` takes."""
        return make_plan(
            self.shape,
            self.largest,
            rows=self.rows,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            weight_bytes=sum(p.nbytes for p in self.model.parameters()),
            capacity=self.cache.capacity if self.cache else None,
            prefill_chunk=self.prefill_chunk,
            prefill_rows=self.prefill_rows,
            on_gpu=self.device.type == "cuda",
        )

    def reserve(self, prompt_tokens: int, new_tokens: int) -> None:
        """Allocate now what a call of that size will take, so that smaller calls before it leave nothing to be made anew."""
        plan = self.plan(prompt_tokens, new_tokens)
        self._allocate_rows(self.largest.capacity(prompt_tokens, new_tokens), plan)
        self._allocate_scratch(plan)
        self._allocate_state(plan)

    def kv_bytes_saved(self, trajectories: Sequence[Trajectory]) -> float:
        """1 - allocated bytes of the cache / bytes that dense rows of the longest trajectory would take."""
        longest = max(t.num_prompt_tokens + len(t.response_tokens) for t in trajectories)
        allocated = self.cache.nbytes + self.scratch.nbytes
        return 1 - allocated / (self.rows * longest * self.cache.shape.kv_bytes_per_token)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int = 1,
        sampling: Sampling | None = None,
        seed: int = 0,
        progress: bool = False,
        on_finish: Callable[[Trajectory], None] | None = None,
        on_tokens: OnTokens | None = None,
        samples: Sequence[Sequence[int]] | None = None,
        keep: bool = True,
    ) -> list[Trajectory]:
        """`group_size` completions of every prompt (lists of token ids), prompt by prompt.

        `on_finish` is called with each trajectory the moment it is complete; `on_tokens` with (prompt index, sample index, token ids)
        whenever the host looks at the device, with what was sampled since: every token of a response once, in order. Neither may run the
        model. On Ctrl-C, what was finished is in the `RolloutInterrupted` that is raised.

        `samples` says of every prompt which members of its group are wanted, instead of `range(group_size)`. They are the completions
        that a call for whole groups of the same prompts gives, so what an interrupted call left out can be asked for later.

        Without `keep` only `on_finish` gets them, and nothing is returned: traces of thousands of long responses take gigabytes.
        """
        sampling = sampling or Sampling()
        prompts = [_token_list(p) for p in prompts]
        require_int(group_size=group_size)
        wanted = (
            [list(range(group_size)) for _ in prompts] if samples is None else _sample_numbers(samples, len(prompts))
        )
        self._check(prompts, sampling)
        if not any(wanted):
            return []
        finished: list[Trajectory] = []
        with (
            self._call(max(map(len, prompts)), sampling.max_new_tokens, finished),
            self._switched(),
            ProgressBar(progress, sum(map(len, wanted)), self.cache) as bar,
        ):

            def deliver(trajectory: Trajectory) -> None:
                if keep:
                    finished.append(trajectory)
                bar.update()
                if on_finish is not None:
                    on_finish(trajectory)

            rollout = GenerateCall(self, prompts, wanted, sampling, seed, on_tokens)
            rollout.run(deliver, bar)
            self._note(rollout)
        return _in_order(finished)

    def stream(self, prompt: Sequence[int], sampling: Sampling | None = None, seed: int = 0) -> Iterator[list[int]]:
        """The tokens of one completion as they are sampled, some at a time: those of `generate([prompt])`.

        Nothing runs between two pieces, and the model is then as it was before, so it may be used; closing the iterator ends the rollout.
        A later call of this engine takes its rows, and cuts the stream off.
        """
        sampling = sampling or Sampling()
        prompts = [_token_list(prompt)]
        self._check(prompts, sampling)
        finished: list[Trajectory] = []
        new: list[int] = []
        with self._call(len(prompts[0]), sampling.max_new_tokens, finished) as call:
            rollout = GenerateCall(self, prompts, [[0]], sampling, seed, lambda _, __, tokens: new.extend(tokens))
            rounds = rollout.rounds(finished.append)
            while not finished:
                if self.calls != call:
                    raise SparseRLError(
                        f"this stream was cut off after {rollout.num_tokens} tokens, because its engine was used for another call; "
                        "read it to its end before, or use a second engine."
                    )
                with self._switched():
                    next(rounds)
                pieces, new[:] = new[:], []
                if pieces:
                    yield pieces
            self._note(rollout)

    def decoder(self, sampling: Sampling, stop_ids: Tensor) -> Decoder:
        """What runs decode steps for these settings: kept from earlier calls, with its graphs, if nothing has moved since."""
        settings = (sampling.temperature, sampling.top_k, sampling.top_p, tuple(stop_ids.tolist()))
        now = addresses(self.model) if self.decoders else None
        if any(known.addresses != now for known in self.decoders.values()):
            self.decoders.clear()  # they hold what has moved or changed since
        if settings not in self.decoders:
            while len(self.decoders) >= _DECODERS:
                self.decoders.pop(next(iter(self.decoders)))
            self.decoders[settings] = Decoder(
                self.model, self.cache, self.state, self.compressor, sampling, stop_ids, waits=self.poll[1] > 1
            )
        return self.decoders[settings]

    @contextmanager
    def _call(self, prompt_tokens: int, new_tokens: int, finished: list[Trajectory]) -> Iterator[int]:
        """Everything a call of that size needs, and its number. Errors take with them what was finished, and leave nothing behind."""
        self.calls += 1
        call, plan = self.calls, self.plan(prompt_tokens, new_tokens)
        try:
            try:
                self.reserve(prompt_tokens, new_tokens)
                yield call
            except BaseException:
                if self.calls == call:
                    self._clear()  # a NaN left in a slot nobody reads would still be multiplied by zero, later
                raise
        except KeyboardInterrupt:
            raise RolloutInterrupted(_in_order(finished)) from None
        except NonFiniteLogits as error:
            error.trajectories = _in_order(finished)
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            explained = self._out_of_memory(plan, str(error))
            explained.trajectories = _in_order(finished)
            raise explained from error
        finally:
            if not self.keeps_state and self.calls == call:
                self.state = None
                self.decoders.clear()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """The model as a rollout needs it."""
        with torch.no_grad(), evaluating(self.model), use_attention(self.model, "slots"):
            yield

    def _note(self, rollout: GenerateCall) -> None:
        self.seconds, self.steps, self.waited = rollout.phases.seconds(), rollout.num_steps, rollout.num_waits

    def _clear(self) -> None:
        for cache in (self.cache, self.scratch):
            for tensor in cache.tensors if cache else ():
                tensor.zero_()

    def _check(self, prompts: list[list[int]], sampling: Sampling) -> None:
        now = next(self.model.parameters())
        if self.cache is not None and (now.dtype, now.device) != (self.shape.dtype, self.cache.keys.device):
            raise SparseRLError(
                f"the model is now {now.dtype} on {now.device}, but this engine was made when it was {self.shape.dtype} on "
                f"{self.cache.keys.device}; make a new Engine."
            )
        vocabulary, new = self.shape.vocabulary, sampling.max_new_tokens
        room = new + beacon_positions(self.model, self.compressor, new)  # positions after the prompt
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise SparseRLError(
                    f"prompt {i} is empty; give at least one token, such as the beginning-of-sequence token."
                )
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise SparseRLError(
                    f"prompt {i} holds token id {min(prompt) if min(prompt) < 0 else max(prompt)}, outside the vocabulary of {vocabulary}; "
                    "was it made with another tokenizer?"
                )
            if len(prompt) > self.shape.context:
                raise SparseRLError(
                    f"prompt {i} has {len(prompt)} tokens, beyond the model's context of {self.shape.context}; "
                    f"shorten it by {len(prompt) - self.shape.context}."
                )
            limit = self.shape.hard_context
            if limit is not None and len(prompt) + room > limit:
                raise SparseRLError(
                    f"prompt {i} has {len(prompt)} tokens and {room} new ones may follow, but this model cannot go beyond {limit} "
                    "positions (its position table ends there, or its RoPE rescales and would falsify keys already cached); "
                    f"set max_new_tokens to at most {(limit - len(prompt)) * new // room}."
                )
            self.compressor.check_prompt(len(prompt))
        longest = max(map(len, prompts), default=0)
        if longest + room > self.shape.context:
            warnings.warn(
                f"{longest} prompt tokens and {room} new ones go beyond the {self.shape.context} positions this model was made for.",
                stacklevel=3,
            )

    def _allocate_rows(self, capacity: int, plan: Plan) -> None:
        """The cache, once and for all."""
        grows = not self.compressor.evicts_response and self.max_tokens is None
        if self.cache is not None and grows and capacity > self.cache.capacity:
            self.cache = self.state = None  # rows that hold whole responses are as long as the longest call so far
            self.decoders.clear()
            plan = replace(
                plan, capacity=capacity, row_bytes=cache_shape(self.shape, self.compressor).row_bytes(capacity)
            )
        if self.cache is None:
            self._require(plan.cache_bytes, plan)
            self.cache = SlotCache(cache_shape(self.shape, self.compressor), self.rows, capacity, self.device)
        elif capacity > self.cache.capacity:
            raise SparseRLError(
                f"rows of this {self.compressor.name} engine hold {self.cache.capacity} tokens, but the call needs {capacity} "
                f"({plan.prompt_tokens} prompt + {plan.new_tokens} new); make the engine with Engine(..., max_tokens={capacity})."
            )

    def _allocate_scratch(self, plan: Plan) -> None:
        """Rows for the longest prompts, made anew when longer ones come, or more of them go together."""
        known = self.scratch
        if known is None or known.capacity < plan.prompt_tokens or known.rows < plan.prefill_rows:
            self.scratch = known = None
            self._require(plan.scratch_bytes, plan)
            self.scratch = SlotCache(
                cache_shape(self.shape, self.compressor), plan.prefill_rows, plan.prompt_tokens, self.device
            )

    def _allocate_state(self, plan: Plan) -> None:
        """Where rows write down what they sample: as large as the largest call so far. A captured step knows all of it but the trace."""
        new = plan.new_tokens
        tokens = 0 if self.compressor.folds else plan.prompt_tokens + new  # where beacons stand tells what was visible
        if self.state is None or self.state.tokens.shape[1] < new:
            tokens = tokens if self.state is None else max(tokens, self.state.trace.shape[3])
            self.state = None
            self.decoders.clear()
            self._require(plan.record_bytes, plan)
            self.state = RowState.empty(self.cache, tokens, new, self.compressor.folds)
        elif self.state.trace.shape[3] < tokens:
            state, self.state = self.state, None
            state.trace = None
            self._require(plan.rows * plan.trace_row_bytes, plan)
            state.trace = empty_trace(self.cache, tokens)
            self.state = state

    def _require(self, needed: int, plan: Plan) -> None:
        free = available_memory(self.device)
        if needed > free:
            raise self._out_of_memory(plan, f"{size(needed)} are needed, {size(free)} are free")

    def _out_of_memory(self, plan: Plan, why: str) -> OutOfMemory:
        held = sum(p.nbytes for p in self.model.parameters()) + sum(c.nbytes for c in (self.cache, self.scratch) if c)
        held += sum(t.nbytes for t in self.state.by_row if t is not None) if self.state else 0
        memory = available_memory(self.device) + held
        return OutOfMemory(
            f"out of memory ({why.splitlines()[0]}).\n{plan.text(memory)}\n{plan.largest_that_fits(memory)}"
        )


def _token_list(prompt) -> list[int]:
    if isinstance(prompt, (str, int)):
        raise SparseRLError(
            f"a prompt is a list of token ids, not {prompt!r:.60}; encode text with the model's tokenizer first."
        )
    return prompt.tolist() if isinstance(prompt, Tensor) else [int(token) for token in prompt]


def _sample_numbers(samples: Sequence[Sequence[int]], prompts: int) -> list[list[int]]:
    """Which members of each prompt's group are wanted."""
    if len(samples) != prompts:
        raise SparseRLError(
            f"samples has {len(samples)} entries for {prompts} prompts; give each a list of numbers, empty if none is wanted."
        )
    for i, numbers in enumerate(samples):
        if not isinstance(numbers, Iterable):
            raise SparseRLError(f"samples[{i}] is {numbers!r}; give a list of sample numbers, such as [{numbers!r}].")
        for number, count in Counter(numbers).items():
            require_int(at_least=0, **{f"a number in samples[{i}]": number})
            if count > 1:
                raise SparseRLError(
                    f"samples[{i}] asks {count} times for sample {number}, which is always the same; name it once."
                )
    return [list(numbers) for numbers in samples]


def _in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))
