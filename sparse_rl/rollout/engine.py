"""The rollout engine: samples completions on a KV cache of fixed capacity that evicts, with any Hugging Face causal LM
that docs/models.md lists as supported.

The model's weights are used in place, so after an update the next rollout needs no copy and no new capture. schedule.py
has the loop of a call, storage.py its memory, decode.py one decode step, and capture.py the capture of steps.

    engine = Engine(model, compressor="rkv", budget=512, interval=128, rows=64)
    trajectories = engine.generate(prompts, group_size=8, sampling=Sampling(max_new_tokens=4096), seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ..attention import Switch, has_alibi
from ..cache import SlotCache
from ..compressors import Compressor, make
from ..errors import NonFiniteLogits, RolloutInterrupted, SparseRLError, check_count, require_int
from ..kernels import ops
from ..kernels.device import check_slots
from ..models import ModelShape, check_model, evaluating
from ..models.routing import RouteRecorder, routing_of, why_not_replayed
from ..planning.memory import Plan, cache_shape, default_prefill_chunk, is_out_of_memory
from ..records import Trajectory
from .capture import Decoder, addresses
from .decode import RowState
from .live import LiveEngine
from .progress import ProgressBar
from .requests import check_conversations, check_prompts, check_sampling, sample_numbers, token_list
from .sampling import Sampling
from .schedule import GenerateCall, OnTokens, stop_ids_of
from .storage import Storage

_DECODERS = 4  # decoders kept with their graphs, one for each way of sampling
_STOPS = 16  # the most ids that may end a turn of an open engine


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
        record_routes: bool = False,
    ):
        """`max_tokens` (prompt + new) fixes the size of rows that hold whole responses (`dense`, `prompt-only`);
        without it they grow with the longest call.

        `prefill_chunk`: prompt tokens fed at a time; `prefill_rows`: the most prompts fed together; `poll`: the least
        and the most decode steps between two syncs with the device. Defaults: 512, 1 and (1, 1) on a CPU; 16,384, as
        many as that holds, and (8, 16) on a GPU.

        `record_routes`: for a mixture of experts, record in the traces which experts each token went through.
        """
        rules = ops.rules(next(model.parameters()).device)
        prefill_chunk = default_prefill_chunk(rules.on_gpu) if prefill_chunk is None else prefill_chunk
        self.poll = rules.poll if poll is None else poll
        require_int(rows=rows, prefill_chunk=prefill_chunk, prefill_rows=1 if prefill_rows is None else prefill_rows)
        if not (isinstance(self.poll, tuple) and len(self.poll) == 2):
            raise SparseRLError(
                f"poll is {poll!r}; it must be two whole numbers, the least and the most steps between two syncs."
            )
        require_int(**{"poll[0]": self.poll[0]})
        require_int(at_least=self.poll[0], **{"poll[1]": self.poll[1]})
        if max_tokens is not None:
            require_int(at_least=2, max_tokens=max_tokens)
        check_model(model)
        self.model, self.rows, self.prefill_chunk = model, rows, prefill_chunk
        self.shape = ModelShape.of(model.config, next(model.parameters()).dtype)
        self.largest = make(compressor).bind(budget, interval)  # the budget for which rows are made
        self.compressor = self.largest  # the present budget
        self.compressor.check_model(model)
        self.compressor.attach(model)
        if self.largest.prompt_chunk and not all(state.continues for state in self.shape.states):
            raise SparseRLError(
                f"prompt_chunk is {self.largest.prompt_chunk}, but the recurrent layers of {self.shape.architecture} "
                "can only read a prompt as a whole; leave it out."
            )
        if (stored := cache_shape(self.shape, self.largest).slots) is not None:
            check_slots(self.device, stored.kind)
        if self.largest.folds and has_alibi(model):
            raise SparseRLError(
                f"{self.shape.architecture} has no positions that a beacon could take; use another model."
            )
        self.switch = Switch(model, "slots")
        with self.switch():
            pass  # refuse models whose attention cannot be replaced before anything is allocated
        self.recorder = self._recorder() if record_routes else None
        routing = None if self.recorder is None else self.recorder.routing
        self.storage = Storage(model, self.shape, self.largest, rows, max_tokens, prefill_chunk, prefill_rows, routing)
        self.version = 0  # optimizer steps behind the weights; written into trajectories
        self.seconds: dict[str, float] = {}  # of the last call, by phase
        self.steps = 0  # decode steps of the last call
        self.waited = 0  # steps that full rows waited for the end of a round, summed over rows
        self.rounds = 0  # of the loop so far, in all calls: it changes as long as a call gets on
        self.calls = 0  # so far; the next call cuts off a stream
        self.stopped = False  # set by another thread, it ends the running call as Ctrl-C would
        self.keeps_state = rules.captures  # captured steps hold the addresses of the row state

    def _recorder(self) -> RouteRecorder:
        """Records the experts that tokens go through."""
        why = "folds chunks into beacons" if self.largest.folds else why_not_replayed(self.model)
        if why is not None:
            raise SparseRLError(f"{self.shape.architecture} {why}: its routes cannot be recorded.")
        routing = routing_of(self.model)
        assert routing is not None
        return RouteRecorder(self.model, routing, lambda: self.switch.modules)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def cache(self) -> SlotCache:
        assert self.storage.cache is not None, "rows that hold whole responses are allocated by the first call"
        return self.storage.cache

    @property
    def scratch(self) -> SlotCache:
        """The cache in which prompts are prefilled."""
        assert self.storage.scratch is not None, "the first call allocates it"
        return self.storage.scratch

    @property
    def state(self) -> RowState:
        """The state of every row."""
        assert self.storage.state is not None, "a call allocates it; on a CPU it is freed afterwards"
        return self.storage.state

    @property
    def decoders(self) -> dict[tuple, Decoder]:
        return self.storage.decoders

    @property
    def capacity(self) -> int:
        """Slots at which a row is full: all that it has, unless `set_budget` asked for fewer."""
        return self.compressor.capacity(0, 0) if self.compressor.evicts_response else self.cache.capacity

    def set_budget(self, budget: int) -> None:
        """From the next call on, keep `budget` slots at an eviction; not more than the engine was made with.

        Rows stay as they are and are used in part, so nothing is allocated or captured again.
        """
        if not self.compressor.has_budget:
            raise SparseRLError(f"{self.compressor.name} has no budget that could be set to {budget}; use another.")
        bound = self.compressor.bind(budget, self.compressor.interval)
        if budget > self.largest.budget:
            raise SparseRLError(
                f"the budget cannot be set to {budget}, because the rows of this engine were made for "
                f"{self.largest.budget}; make the engine with Engine(..., budget={budget})."
            )
        self.compressor = bound

    def plan(self, prompt_tokens: int, new_tokens: int, sampling: Sampling | None = None) -> Plan:
        """The memory plan of a call with prompts of up to `prompt_tokens`. sampling: if it records the support"""
        return self.storage.plan(prompt_tokens, new_tokens, self._room(sampling))

    def reserve(self, prompt_tokens: int, new_tokens: int, sampling: Sampling | None = None) -> None:
        """Allocate now what a call of this size needs, so that it and smaller calls allocate nothing."""
        self.storage.reserve(prompt_tokens, new_tokens, self._room(sampling))

    def _room(self, sampling: Sampling | None) -> int | None:
        return None if sampling is None else sampling.room(self.shape.vocabulary)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows; 0 before they are allocated."""
        return self.storage.cache.nbytes if self.storage.cache else 0

    def kv_bytes_saved(
        self, trajectories: Sequence[Trajectory], allocated: int | None = None, engines: int = 1
    ) -> float:
        """1 - allocated bytes of the cache / bytes that dense rows of the longest trajectory would take.

        `allocated`: bytes of all caches if `engines` like this one sampled; None: this engine's cache
        """
        longest = max(t.num_text_tokens for t in trajectories)
        shape = cache_shape(self.shape, self.largest)
        allocated = self.cache.nbytes + self.scratch.nbytes if allocated is None else allocated
        return 1 - allocated / (engines * self.rows * (longest * shape.kv_bytes_per_token + shape.state_bytes))

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

        `on_finish` is called with each trajectory as soon as it is complete; `on_tokens` with (prompt index, sample
        index, token ids) whenever the host syncs with the device, with the tokens sampled since then: every token of a
        response once, in order. Neither may run the model. On Ctrl-C a `RolloutInterrupted` is raised, which holds the
        finished trajectories.

        `samples` lists for every prompt the members of its group that are wanted, instead of `range(group_size)`. They
        are the same completions as in a call for whole groups, so what an interrupted call did not finish can be
        sampled later.

        Without `keep`, only `on_finish` gets the trajectories and nothing is returned, because the traces of thousands
        of long responses take gigabytes.
        """
        sampling = sampling or Sampling()
        prompts = [token_list(p) for p in prompts]
        require_int(group_size=group_size)
        check_count("completions", len(prompts) * group_size)
        everyone = [list(range(group_size)) for _ in prompts]
        wanted = everyone if samples is None else sample_numbers(samples, len(prompts))
        self.check(prompts, sampling)
        if not any(wanted):
            return []
        finished: list[Trajectory] = []
        with (
            self._call(max(map(len, prompts)), sampling, finished),
            self._switched(),
            ProgressBar(progress, sum(map(len, wanted)), self.cache) as bar,
        ):

            def deliver(trajectory: Trajectory) -> None:
                if keep:
                    finished.append(trajectory)
                bar.update()
                if on_finish is not None:
                    on_finish(trajectory)

            call = GenerateCall(self, prompts, wanted, sampling, seed, on_tokens)
            call.run(deliver, bar)
            self._note(call)
        return _in_order(finished)

    def stream(
        self, prompt: Sequence[int], sampling: Sampling | None = None, seed: int = 0
    ) -> Generator[list[int], None, None]:
        """The tokens of the completion `generate([prompt])`, some at a time as they are sampled.

        Nothing runs between two pieces, and the model is restored, so it may be used in between. Closing the iterator
        ends the rollout. A later call of this engine takes its rows and cuts the stream off.
        """
        sampling, prompts = sampling or Sampling(), [token_list(prompt)]
        self.check(prompts, sampling)
        finished: list[Trajectory] = []
        new: list[int] = []
        with self._call(len(prompts[0]), sampling, finished) as number:
            with self._switched():
                call = GenerateCall(self, prompts, [[0]], sampling, seed, lambda _, __, tokens: new.extend(tokens))
            rounds = call.rounds(finished.append)
            while not finished:
                if self.calls != number:
                    raise SparseRLError(
                        f"this stream was cut off after {call.num_tokens} tokens, because its engine was used for "
                        "another call; read a stream to its end first, or use a second engine."
                    )
                with self._switched():
                    next(rounds)
                pieces, new[:] = new[:], []
                if pieces:
                    yield pieces
            self._note(call)

    def open(
        self,
        prompt_tokens: int,
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        waiting: int = 1024,
        conversations: int | None = None,
        hold: int | None = None,
        hold_seconds: float | None = None,
        park: int | None = None,
        tokenizer=None,
        patience: float | None = 0.0,
    ) -> LiveEngine:
        """Open the engine for conversations (live.py): prompts of up to `prompt_tokens`, `max_tokens` in all.

        `sampling`: only its record of the tokens that could be drawn matters; every turn brings its own settings.
        `waiting`: conversations that may wait for a row. `conversations`: those that may be open (default: four times
        as many as rows, plus those that wait).

        A conversation that stopped keeps its row: at most `hold` of them (default: all), for `hold_seconds` (default:
        until others need the row). Then it is parked in host memory, at most `park` of them (default: four times as
        many as rows), and continues with the same bits. Beyond that only its trace is kept, and it continues up to
        rounding. `patience`: seconds for which a held row is not given to others, because its conversation may soon
        continue; None: as long as that costs less than moving it. `tokenizer`: for stop strings.
        """
        require_int(prompt_tokens=prompt_tokens, waiting=waiting)
        require_int(at_least=prompt_tokens + 1, max_tokens=max_tokens)
        hold, park = self.rows if hold is None else hold, 4 * self.rows if park is None else park
        require_int(at_least=0, hold=hold, park=park)
        if hold_seconds is not None and (not isinstance(hold_seconds, int | float) or not hold_seconds >= 0):
            raise SparseRLError(f"hold_seconds is {hold_seconds!r}; it must be a number of at least 0, or None.")
        conversations = 4 * self.rows + waiting if conversations is None else conversations
        require_int(conversations=conversations)
        check_conversations(max_tokens, self.shape, self.compressor)
        sampling = Sampling() if sampling is None else check_sampling(sampling)
        self.check([], Sampling())
        call = self._call(prompt_tokens, sampling, [], max_tokens)
        return LiveEngine(
            self, call, prompt_tokens, max_tokens, waiting, conversations, hold, hold_seconds, park, tokenizer, patience
        )

    def decoder(self, sampling: Sampling | None) -> Decoder:
        """The decoder for these settings (None: every row has its own), kept with its graphs from earlier calls if
        nothing has moved.
        """
        settings, stop_ids = ("by row",), torch.empty(0, dtype=torch.int64, device=self.device)
        if sampling is not None:
            stop_ids = stop_ids_of(self.model, sampling)
            ways = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.records)
            settings = (*ways, tuple(stop_ids.tolist()))
        now = addresses(self.model) if self.decoders else None
        if any(known.addresses != now for known in self.decoders.values()):
            self.decoders.clear()  # they refer to what has been moved or changed
        if settings not in self.decoders:
            while len(self.decoders) >= _DECODERS:
                self.decoders.pop(next(iter(self.decoders)))
            waits = self.poll[1] > 1 or sampling is None
            self.decoders[settings] = Decoder(
                self.model, self.cache, self.state, self.compressor, sampling, stop_ids, waits, self.recorder
            )
        return self.decoders[settings]

    @contextmanager
    def _call(
        self, prompt_tokens: int, sampling: Sampling, finished: list[Trajectory], max_tokens: int | None = None
    ) -> Iterator[int]:
        """Reserve the memory of a call and yield the call's number. Errors get the finished trajectories.

        max_tokens: the longest conversation of an open engine
        """
        self.calls += 1
        number, new_tokens = self.calls, sampling.max_new_tokens
        if max_tokens is None:
            plan = self.plan(prompt_tokens, new_tokens, sampling)
        else:
            plan = self.storage.live_plan(prompt_tokens, max_tokens, self._room(sampling))
        try:
            try:
                if max_tokens is None:
                    self.reserve(prompt_tokens, new_tokens, sampling)
                else:
                    self.storage.reserve_live(prompt_tokens, max_tokens, _STOPS, self._room(sampling))
                yield number
            except BaseException:
                if self.calls == number:
                    self.storage.clear()  # a NaN in an unused slot would later be multiplied by zero, which gives NaN
                raise
        except KeyboardInterrupt:
            raise RolloutInterrupted(_in_order(finished)) from None
        except NonFiniteLogits as error:
            error.trajectories = _in_order(finished)
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            explained = self.storage.out_of_memory(plan, str(error))
            explained.trajectories = _in_order(finished)
            raise explained from error
        finally:
            if not self.keeps_state and self.calls == number:
                self.storage.drop_state()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Put the model into the state that a rollout needs, and restore it afterwards."""
        recording = self.recorder or nullcontext()
        with torch.no_grad(), evaluating(self.model, self.switch.modules), self.switch(), recording:
            yield

    def _note(self, call: GenerateCall) -> None:
        self.seconds, self.steps, self.waited = call.phases.seconds(), call.num_steps, call.num_waits

    def check(self, prompts: list[list[int]], sampling: Sampling) -> None:
        """Refuse prompts that cannot be sampled from."""
        now, cache = next(self.model.parameters()), self.storage.cache
        if cache is not None and (now.dtype, now.device) != (self.shape.dtype, cache.device):
            raise SparseRLError(
                f"the model is now {now.dtype} on {now.device}, but this engine was made when it was "
                f"{self.shape.dtype} on {cache.device}; make a new Engine."
            )
        check_prompts(prompts, sampling.max_new_tokens, self.shape, self.compressor, self.model)


def _in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))
