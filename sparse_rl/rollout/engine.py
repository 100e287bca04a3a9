"""The rollout engine: completions of prompts by any Hugging Face causal LM on a fixed-capacity, evicting KV cache.

The model's weights are used in place, so after an update the next rollout needs no copy. What happens in a call is in schedule.py.

    engine = Engine(model, compressor="rkv", budget=512, interval=128, rows=64)
    trajectories = engine.generate(prompts, group_size=8, sampling=Sampling(max_new_tokens=4096), seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..attention import use_attention
from ..cache import SlotCache
from ..compressors import Compressor, make
from ..errors import OutOfMemory, RolloutInterrupted, SparseRLError
from ..models import ModelShape
from ..plan import Plan, available_memory, cache_shape, is_out_of_memory, make_plan, size
from ..records import Trajectory
from .progress import ProgressBar
from .sampling import Sampling
from .schedule import Rollout


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
        """`max_tokens` (prompt + new) sizes the rows of `dense`, which otherwise takes them from its first call."""
        if rows < 1 or prefill_chunk < 1:
            raise SparseRLError(f"rows {rows} and prefill_chunk {prefill_chunk} must both be at least 1.")
        self.model = model
        self.shape = ModelShape.of(model.config, next(model.parameters()).dtype)
        self.compressor = make(compressor).bind(budget, interval)
        self.rows, self.max_tokens, self.prefill_chunk = rows, max_tokens, prefill_chunk
        self.version = 0  # optimizer steps behind the weights; stamped on trajectories
        self.cache: SlotCache | None = None
        self.scratch: SlotCache | None = None
        if self.compressor.evicts or max_tokens:
            self._allocate(prompt_tokens=1, new_tokens=max(1, (max_tokens or 2) - 1))

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
            self._allocate(longest, sampling.max_new_tokens)
            with self._rollout_mode(), ProgressBar(progress, len(prompts) * group_size, self.cache) as bar:
                rollout = Rollout(self, prompts, group_size, sampling, seed, longest)
                for trajectory in rollout.run(bar):
                    finished.append(trajectory)
                    if on_finish is not None:
                        on_finish(trajectory)
        except KeyboardInterrupt:
            raise RolloutInterrupted(_in_order(finished)) from None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(self.plan(longest, sampling.max_new_tokens), str(error)) from error
        return _in_order(finished)

    def _check(self, prompts: list[list[int]], group_size: int, sampling: Sampling) -> None:
        if group_size < 1:
            raise SparseRLError(f"group_size is {group_size}; it must be at least 1.")
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
                    f"prompt {i} has {len(prompt)} tokens and {new} new ones may follow, but this model's RoPE rescales beyond {limit} "
                    f"positions, which would falsify keys already cached; set max_new_tokens to at most {limit - len(prompt)}."
                )
            self.compressor.check_prompt(len(prompt))

    def _allocate(self, prompt_tokens: int, new_tokens: int) -> None:
        """Rows once; the scratch row anew when a longer prompt comes."""
        needed = self.compressor.capacity(prompt_tokens, new_tokens)
        if self.cache is not None and needed > self.cache.capacity:
            raise SparseRLError(
                f"rows of this {self.compressor.name} engine hold {self.cache.capacity} tokens, but the call needs {needed} "
                f"({prompt_tokens} prompt + {new_tokens} new); make the engine with Engine(..., max_tokens={needed})."
            )
        shape, grow = cache_shape(self.shape, self.compressor), self.scratch is None or self.scratch.capacity < prompt_tokens
        plan = self.plan(prompt_tokens, new_tokens)
        new_bytes = (0 if self.cache else plan.cache_bytes) + (plan.scratch_bytes if grow else 0)
        if new_bytes > available_memory(self.device):
            raise self._out_of_memory(plan, f"{size(new_bytes)} are needed, {size(available_memory(self.device))} are free")
        if self.cache is None:
            self.cache = SlotCache(shape, self.rows, needed, self.device)
        if grow:
            self.scratch = SlotCache(shape, 1, prompt_tokens, self.device)

    def _out_of_memory(self, plan: Plan, why: str) -> OutOfMemory:
        held = sum(p.nbytes for p in self.model.parameters()) + sum(c.nbytes for c in (self.cache, self.scratch) if c)
        memory = available_memory(self.device) + held
        return OutOfMemory(f"out of memory ({why.splitlines()[0]}).\n{plan.text(memory)}\n{plan.largest_that_fits(memory)}")

    @contextmanager
    def _rollout_mode(self) -> Iterator[None]:
        """Eval mode and the slots attention, given back afterwards module by module."""
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad(), use_attention(self.model, "slots"):
                yield
        finally:
            for module in training:
                module.training = True


def _token_list(prompt) -> list[int]:
    return prompt.tolist() if isinstance(prompt, Tensor) else [int(token) for token in prompt]


def _in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))
