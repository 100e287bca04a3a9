"""The rollout engine: completions of prompts by any Hugging Face causal LM on a fixed-capacity, evicting KV cache.

The model's weights are used in place, so after an update the next rollout needs no copy. What happens in a call is in schedule.py.

    engine = Engine(model, compressor="rkv", budget=512, interval=128, rows=64)
    trajectories = engine.generate(prompts, group_size=8, sampling=Sampling(max_new_tokens=4096), seed=0)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..attention import use_attention
from ..cache import SlotCache
from ..compressors import Compressor, make
from ..errors import NonFiniteLogits, OutOfMemory, RolloutInterrupted, SparseRLError, whole
from ..models import ModelShape, check_model, evaluating
from ..plan import Plan, available_memory, cache_shape, is_out_of_memory, make_plan, size
from ..records import Trajectory
from .progress import ProgressBar
from .sampling import Sampling
from .schedule import Rollout

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
        prefill_chunk: int = 512,
    ):
        """`max_tokens` (prompt + new) sizes the rows of `dense` once and for all; otherwise they grow with the longest call."""
        whole(rows=rows, prefill_chunk=prefill_chunk)
        if max_tokens is not None:
            whole(at_least=2, max_tokens=max_tokens)
        check_model(model)
        self.model = model
        self.shape = ModelShape.of(model.config, next(model.parameters()).dtype)
        self.compressor = make(compressor).bind(budget, interval)
        with use_attention(model, "slots"):
            pass  # refuses models whose attention cannot be replaced, before anything is allocated
        self.rows, self.max_tokens, self.prefill_chunk = rows, max_tokens, prefill_chunk
        self.version = 0  # optimizer steps behind the weights; stamped on trajectories
        self.cache: SlotCache | None = None
        self.scratch: SlotCache | None = None
        if self.compressor.evicts:
            capacity = self.compressor.capacity(0, 0)
            new_tokens = max(1, (max_tokens or capacity + _USUAL_RESPONSE) - capacity)
            self._allocate_rows(capacity, self.plan(prompt_tokens=capacity, new_tokens=new_tokens))
        elif max_tokens is not None:
            self._allocate_rows(max_tokens, self.plan(prompt_tokens=1, new_tokens=max_tokens - 1))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, prompt_tokens: int, new_tokens: int) -> Plan:
        """What a call with prompts of up to `prompt_tokens` takes."""
        return make_plan(
            self.shape,
            self.compressor,
            rows=self.rows,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            weight_bytes=sum(p.nbytes for p in self.model.parameters()),
            capacity=self.cache.capacity if self.cache else None,
            prefill_chunk=self.prefill_chunk,
        )

    def kv_bytes_saved(self, trajectories: Sequence[Trajectory]) -> float:
        """1 - allocated bytes of the cache / bytes that dense rows of the longest trajectory would take."""
        longest = max(len(t.tokens) for t in trajectories)
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
    ) -> list[Trajectory]:
        """`group_size` completions of every prompt (lists of token ids), prompt by prompt.

        `on_finish` is called with each trajectory the moment it is complete; it must not run the model. On Ctrl-C, what was finished
        is in the `RolloutInterrupted` that is raised.
        """
        sampling = sampling or Sampling()
        prompts = [_token_list(p) for p in prompts]
        self._check(prompts, group_size, sampling)
        if not prompts:
            return []
        longest = max(map(len, prompts))
        finished: list[Trajectory] = []
        try:
            plan = self.plan(longest, sampling.max_new_tokens)
            self._allocate_rows(self.compressor.capacity(longest, sampling.max_new_tokens), plan)
            self._allocate_scratch(plan)
            with (
                torch.no_grad(),
                evaluating(self.model),
                use_attention(self.model, "slots"),
                ProgressBar(progress, len(prompts) * group_size, self.cache) as bar,
            ):

                def deliver(trajectory: Trajectory) -> None:
                    finished.append(trajectory)
                    bar.update()
                    if on_finish is not None:
                        on_finish(trajectory)

                try:
                    Rollout(self, prompts, group_size, sampling, seed, longest).run(deliver, bar)
                except BaseException:
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
        return _in_order(finished)

    def _clear(self) -> None:
        for cache in (self.cache, self.scratch):
            for tensor in cache.tensors if cache else ():
                tensor.zero_()

    def _check(self, prompts: list[list[int]], group_size: int, sampling: Sampling) -> None:
        whole(group_size=group_size)
        now = next(self.model.parameters())
        if self.cache is not None and (now.dtype, now.device) != (self.shape.dtype, self.cache.keys.device):
            raise SparseRLError(
                f"the model is now {now.dtype} on {now.device}, but this engine was made when it was {self.shape.dtype} on "
                f"{self.cache.keys.device}; make a new Engine."
            )
        vocabulary, new = self.shape.vocabulary, sampling.max_new_tokens
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise SparseRLError(f"prompt {i} is empty; give at least one token, such as the beginning-of-sequence token.")
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
            if limit is not None and len(prompt) + new > limit:
                raise SparseRLError(
                    f"prompt {i} has {len(prompt)} tokens and {new} new ones may follow, but this model cannot go beyond {limit} positions "
                    "(its position table ends there, or its RoPE rescales and would falsify keys already cached); "
                    f"set max_new_tokens to at most {limit - len(prompt)}."
                )
            self.compressor.check_prompt(len(prompt))
        longest = max(map(len, prompts), default=0)
        if longest + new > self.shape.context:
            warnings.warn(
                f"{longest} prompt tokens and {new} new ones go beyond the {self.shape.context} positions this model was made for.",
                stacklevel=3,
            )

    def _allocate_rows(self, capacity: int, plan: Plan) -> None:
        """The cache, once and for all."""
        if self.cache is not None and not self.compressor.evicts and self.max_tokens is None and capacity > self.cache.capacity:
            self.cache = None  # dense rows are as long as the longest call so far
            plan = replace(plan, capacity=capacity, row_bytes=cache_shape(self.shape, self.compressor).row_bytes(capacity))
        if self.cache is None:
            self._require(plan.cache_bytes, plan)
            self.cache = SlotCache(cache_shape(self.shape, self.compressor), self.rows, capacity, self.device)
        elif capacity > self.cache.capacity:
            raise SparseRLError(
                f"rows of this {self.compressor.name} engine hold {self.cache.capacity} tokens, but the call needs {capacity} "
                f"({plan.prompt_tokens} prompt + {plan.new_tokens} new); make the engine with Engine(..., max_tokens={capacity})."
            )

    def _allocate_scratch(self, plan: Plan) -> None:
        """One row for the longest prompt, made anew when a longer one comes."""
        if self.scratch is None or self.scratch.capacity < plan.prompt_tokens:
            self.scratch = None
            self._require(plan.scratch_bytes, plan)
            self.scratch = SlotCache(cache_shape(self.shape, self.compressor), 1, plan.prompt_tokens, self.device)

    def _require(self, needed: int, plan: Plan) -> None:
        free = available_memory(self.device)
        if needed > free:
            raise self._out_of_memory(plan, f"{size(needed)} are needed, {size(free)} are free")

    def _out_of_memory(self, plan: Plan, why: str) -> OutOfMemory:
        held = sum(p.nbytes for p in self.model.parameters()) + sum(c.nbytes for c in (self.cache, self.scratch) if c)
        memory = available_memory(self.device) + held
        return OutOfMemory(f"out of memory ({why.splitlines()[0]}).\n{plan.text(memory)}\n{plan.largest_that_fits(memory)}")


def _token_list(prompt) -> list[int]:
    if isinstance(prompt, (str, int)):
        raise SparseRLError(f"a prompt is a list of token ids, not {prompt!r:.60}; encode text with the model's tokenizer first.")
    return prompt.tolist() if isinstance(prompt, Tensor) else [int(token) for token in prompt]


def _in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))
