"""A process's share of a step: complete its prompts on a compressed cache, grade them, and score them with the weights that sampled.

Nothing here waits for another process, so it may run while the learner works (ahead.py). What a process samples does not depend on which
others there are: a completion's random numbers belong to its prompt and place in the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from ..config import Recipe
from ..errors import SparseRLError
from ..learn.batch import apply_correction, collate, join, score
from ..learn.score import overlap
from ..models import encode, evaluating, stop_ids
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..streams import stream_key
from ..tasks import Grade, Prompt, Task
from .budget import BudgetControl, compressor_of
from .deal import LengthsSeen, deal
from .held_out import complete
from .log import Clock
from .merge import first_head_trace, owned
from .step import StepRollout


class Sampler:
    def __init__(self, recipe: Recipe, model: nn.Module, tokenizer, task: Task, rank: int = 0, processes: int = 1):
        self.recipe, self.model, self.tokenizer, self.task = recipe, model, tokenizer, task
        self.rank, self.processes = rank, processes
        self.method = recipe.learn.resolve_method()
        rollout = recipe.rollout
        if rollout.prompts < processes:
            raise SparseRLError(
                f"rollout.prompts is {rollout.prompts} for {processes} processes, but a group stays on one; use at least as many prompts."
            )
        self.reference = self._reference()
        self.engine = Engine(model, compressor_of(rollout), rollout.max_budget, rollout.interval, rollout.rows)
        self.sampling = Sampling(
            rollout.max_new_tokens, rollout.temperature, stop_ids=self._stop_ids(), for_correction=True
        )
        self.budget = BudgetControl(rollout.budget, self.engine)
        self.lengths = LengthsSeen()

    def step(self, number: int, clock: Clock) -> StepRollout:
        """Completions of this process's prompts of a step, graded and scored; rejected ones replaced where the recipe says so."""
        n, group = self.recipe.rollout.prompts, self.recipe.rollout.group_size
        with clock.stage("rollout"):
            prompts = self.task.sample(number * n, n)
            ids = self.encode(prompts)
            owner = deal(
                self.lengths.expect(prompts, list(map(len, ids))), self.recipe.learn.minibatches, self.processes
            )
        mine = [i * group + j for i in range(n) for j in range(group) if owner[i] == self.rank]  # places in the step
        rollout = self._complete(number, 0, prompts, ids, mine, clock)
        for turn in range(1, self.recipe.learn.refill + 1):
            rejected = (~apply_correction(rollout.scored, self.method.correction).accepted[rollout.chosen]).nonzero()[
                :, 0
            ]
            if not len(rejected):
                break
            more = self._complete(number, turn, prompts, ids, [mine[i] for i in rejected.tolist()], clock)
            first = len(rollout.trajectories)
            rollout = replace(
                rollout,
                prompts=rollout.prompts + more.prompts,
                trajectories=rollout.trajectories + more.trajectories,
                texts=rollout.texts + more.texts,
                grades=rollout.grades + more.grades,
                scored=join(rollout.scored, more.scored),
                chosen=rollout.chosen.clone(),
                trace_bytes=rollout.trace_bytes + more.trace_bytes,
            )
            good = apply_correction(more.scored, self.method.correction).accepted
            rollout.chosen[rejected[good]] = first + good.nonzero()[:, 0]
        with clock.stage("diagnose"):
            alpha = self._alpha(rollout, mine, n * group)
        return replace(rollout, alpha=alpha, seconds=clock.seconds["rollout"], grading_error=self.task.last_error)

    def _complete(
        self, number: int, turn: int, prompts: list[Prompt], ids: list[list[int]], places: list[int], clock: Clock
    ) -> StepRollout:
        """Completions for some places of a step."""
        group, learn = self.recipe.rollout.group_size, self.recipe.learn
        members = [[] for _ in ids]
        for place in places:
            members[place // group].append(place % group)
        with clock.stage("rollout"):
            trajectories = self.engine.generate(
                ids, group, self.sampling, stream_key(self.recipe.run.seed, [number, turn]), samples=members
            )
        with clock.stage("grade"):
            asked = [prompts[t.prompt_index] for t in trajectories]
            texts = self.tokenizer.batch_decode([t.response_tokens for t in trajectories], skip_special_tokens=True)
            grades = self.task.grade(asked, texts)
        with clock.stage("score"):
            reference = self.reference() if self.reference else None
            sampled = collate(trajectories)
            scored = score(
                self.model, sampled, learn.micro_batch_tokens, self.sampling.temperature, reference, self.method.view
            )
        size = sum(t.trace.nbytes for t in trajectories)
        return StepRollout(
            asked,
            trajectories,
            texts,
            grades,
            owned(scored, self.rank),
            torch.arange(len(trajectories)),
            trace_bytes=size,
        )

    def _alpha(self, rollout: StepRollout, mine: list[int], places: int) -> dict[int, torch.Tensor]:
        """Overlaps of the dense with the sampler's distribution, of a few trajectories that are spread over the step."""
        wanted = (
            range(0, places, max(1, places // self.recipe.run.diagnose))[: self.recipe.run.diagnose]
            if self.recipe.run.diagnose
            else ()
        )
        with evaluating(self.model):
            return {
                place: overlap(self.model, rollout.trajectories[i], self.sampling.temperature).double().cpu()
                for i, place in enumerate(mine)
                if place in wanted
            }

    def complete_held_out(
        self, engine: Engine, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling
    ) -> list[tuple[Trajectory, Grade]]:
        """This process's share of held-out completions; with several processes, their traces without_full_traces."""
        members = [list(range(samples)) if i % self.processes == self.rank else [] for i in range(len(prompts))]
        seed = stream_key(self.recipe.run.seed, [-2])
        trajectories, grades = complete(engine, self.tokenizer, task, prompts, samples, sampling, seed, members)
        if self.processes > 1:
            trajectories = [replace(t, trace=first_head_trace(t.trace)) for t in trajectories]
        return list(zip(trajectories, grades, strict=True))

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        ids = [encode(self.tokenizer, prompt.text) for prompt in prompts]
        self.budget.check_prompts(ids)
        return ids

    def _stop_ids(self) -> tuple[int, ...]:
        """The tokens the recipe names, besides the model's own."""
        names = self.recipe.rollout.stop
        ids = [self.tokenizer.convert_tokens_to_ids(name) for name in names]
        for name, number in zip(names, ids):
            if number is None or number == self.tokenizer.unk_token_id:
                raise SparseRLError(f"rollout.stop names {name!r}, which is not a token of this tokenizer.")
        return tuple(dict.fromkeys([*ids, *stop_ids(self.model, self.tokenizer)]))

    def _reference(self) -> Callable | None:
        """A function that opens the starting model, for the KL term; None without one."""
        if self.recipe.loss.beta == 0:
            return None
        if self.recipe.model.lora_rank:

            @contextmanager
            def without_adapters() -> Iterator:
                with self.model.disable_adapter():
                    yield self.model

            return without_adapters
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return lambda: nullcontext(frozen)
