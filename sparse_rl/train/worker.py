"""A process's share of a step: complete its prompts on a compressed cache, grade them, score them with the same
weights.

Nothing here waits for another process, so it may run while the learner works (prefetch.py). What a process samples does
not depend on the other processes: a completion's random numbers belong to its prompt and its position in the step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..chat import Talk, Turns, with_faults
from ..config import Recipe
from ..errors import SparseRLError
from ..learn.advantage import without_variance
from ..learn.batch import Sampled, Scored, accepted_rows, collate, minibatch_rows, score
from ..learn.critic import Critic
from ..learn.overlap import overlap
from ..learn.packing import packs
from ..models import evaluating, stop_ids
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..streams import stream_key
from ..tasks import FAR, Grade, Prompt, Task
from .budget import BudgetControl, compressor_of
from .deal import LengthsSeen, deal
from .held_out import chats_of, complete, sampled, starts
from .log import Clock
from .merge import append, first_head_trace
from .parts import replayed_routing
from .rewards import AddedRewards
from .samples import positions_to_write, samples_due
from .step import StepRollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPARE = FAR // 2  # where the prompts begin that replace others: beyond those of any run, before held-out ones
CHECK_STREAM = 0xC4EC4  # separates the draws of trajectories to check from other random numbers of a step
MOST_CHECKED = 20_000  # prompts that are encoded before a run begins, about a millisecond each


class Sampler:
    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        rank: int = 0,
        processes: int = 1,
        critic: Critic | None = None,
    ):
        self.recipe, self.model, self.tokenizer, self.task = recipe, model, tokenizer, task
        self.critic = critic
        self.rank, self.processes = rank, processes
        self.method = recipe.learn.resolve_method()
        rollout = recipe.rollout
        if rollout.prompts < processes:
            raise SparseRLError(
                f"rollout.prompts is {rollout.prompts} for {processes} processes, but a group stays on one process; "
                "use at least as many prompts as processes."
            )
        self.reference = self._reference()
        self.routing = replayed_routing(recipe, model)
        self.engine = Engine(
            model,
            compressor_of(rollout),
            rollout.max_budget,
            rollout.interval,
            rollout.rows,
            record_routes=self.routing is not None and self.method.view == "shadow",
        )
        if recipe.records_support and self.engine.compressor.chooses:
            raise SparseRLError(
                f"rollout.top_k is {rollout.top_k} and rollout.top_p {rollout.top_p}, but with {rollout.compressor} "
                "the policy chooses its folds, and then it must be able to draw every token: use 0 and 1."
            )
        self.sampling = Sampling(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            stop_ids=self._stop_ids(),
            for_correction=True,
            support=recipe.records_support,
        )
        self.chats = chats_of(model, tokenizer, task)
        self.turns = Turns(rollout.max_turns, rollout.max_given_tokens)
        self.rewards = AddedRewards(recipe)
        self.budget = BudgetControl(rollout.budget, self.engine)
        self.lengths = LengthsSeen()

    def step(self, number: int, clock: Clock) -> StepRollout:
        """Completions of this process's prompts of a step, graded and scored; replaced where the recipe says so."""
        count, group = self.recipe.rollout.prompts, self.recipe.rollout.group_size
        with clock.stage("rollout"):
            prompts = self.task.sample(number * count, count)
            ids = self.encode(prompts)
            expected = self.lengths.expect(prompts, list(map(len, ids)))
            owner_rank = deal(expected, self.recipe.learn.minibatches, self.processes)  # of every prompt
        own_positions = [i * group + j for i in range(count) for j in range(group) if owner_rank[i] == self.rank]
        rollout = self._complete(number, 0, prompts, ids, own_positions, clock)
        if self.recipe.learn.refill:
            rollout = self._refill(rollout, number, prompts, ids, own_positions, clock)
        if self.recipe.learn.dynamic:
            rollout = self._replace_flat_groups(rollout, number, own_positions, clock)
        with clock.stage("diagnose"):
            alpha = self._alpha(rollout, own_positions, count * group)
        return replace(rollout, alpha=alpha, seconds=clock.seconds["rollout"], grading_error=self.grading_error)

    def check_prompts_of_files(self, steps_done: int) -> None:
        """Refuse a run that would stop at a prompt it cannot sample from. The prompts of files are known beforehand."""
        rollout = self.recipe.rollout
        begin = steps_done * rollout.prompts
        whole = self.task.positions_of_all(begin)  # the rest of an epoch and the next one: every prompt
        visited = whole if self.recipe.learn.dynamic else self.recipe.run.steps * rollout.prompts - begin
        count = min(visited, whole, MOST_CHECKED)  # with dynamic sampling any prompt may come
        refused: list[tuple[int, SparseRLError]] = []
        for start in range(begin, begin + count, 1000):
            prompts = self.task.sample(start, min(1000, begin + count - start))
            with warnings.catch_warnings():  # of long prompts, which are given when they are sampled from
                warnings.simplefilter("ignore")
                for place, prompt in enumerate(prompts, start):
                    try:
                        self.engine.check(self.encode([prompt]), self.sampling)
                    except SparseRLError as error:
                        refused.append((place, error))
        if refused:
            place, error = refused[0]
            raise SparseRLError(
                f"{len(refused)} of the next {count:,} prompts cannot be sampled from, the first in step "
                f"{place // rollout.prompts + 1}: {error}"
            )

    def _refill(
        self,
        rollout: StepRollout,
        number: int,
        prompts: list[Prompt],
        ids: list[list[int]],
        own_positions: list[int],
        clock: Clock,
    ) -> StepRollout:
        """Sample replacements for rejected trajectories, in up to `learn.refill` rounds."""
        rollout = replace(rollout, accepted=accepted_rows(rollout.scored, self.method.correction))
        for turn in range(1, self.recipe.learn.refill + 1):
            assert rollout.accepted is not None
            rejected = (~rollout.accepted[rollout.chosen_rows]).nonzero()[:, 0]  # indices of own_positions
            if not len(rejected):
                break
            more = self._complete(number, turn, prompts, ids, [own_positions[i] for i in rejected.tolist()], clock)
            good = accepted_rows(more.scored, self.method.correction)
            chosen_rows = rollout.chosen_rows.clone()
            chosen_rows[rejected[good]] = len(rollout.trajectories) + good.nonzero()[:, 0]
            rollout = append(rollout, more, chosen_rows, torch.cat([rollout.accepted, good]))
        return rollout

    def _replace_flat_groups(
        self, rollout: StepRollout, number: int, own_positions: list[int], clock: Clock
    ) -> StepRollout:
        """Sample other prompts for groups whose rewards are all equal, in up to `learn.dynamic` rounds.

        As published, a punishment for length is not looked at: a prompt whose answers are all right is replaced.
        A round has a prompt of its own for every position of the step, of which those that are needed are completed;
        so they do not depend on how positions were dealt.
        """
        count, group, rounds = self.recipe.rollout.prompts, self.recipe.rollout.group_size, self.recipe.learn.dynamic
        positions = torch.tensor(own_positions).view(-1, group)
        for turn in range(1, rounds + 1):
            chosen_rows = rollout.chosen_rows.view(-1, group)
            flat = without_variance(self.rewards.whatever_their_length(rollout.grades)[chosen_rows])
            if not flat.any():
                break
            with clock.stage("rollout"):
                prompts = self.task.sample(SPARE + (number * rounds + turn - 1) * count, count)
                ids = self.encode(prompts)
            more = self._complete(number, turn, prompts, ids, positions[flat].flatten().tolist(), clock)
            rows = torch.arange(len(more.trajectories)).view(-1, group)
            better = ~without_variance(self.rewards.whatever_their_length(more.grades)[rows])
            chosen_rows = chosen_rows.clone()
            chosen_rows[flat.nonzero()[better, 0]] = len(rollout.trajectories) + rows[better]
            rollout = append(rollout, more, chosen_rows.flatten())
        return rollout

    def _complete(
        self, number: int, turn: int, prompts: list[Prompt], ids: list[list[int]], positions: list[int], clock: Clock
    ) -> StepRollout:
        """Completions for some positions of a step."""
        group = self.recipe.rollout.group_size
        members: list[list[int]] = [[] for _ in ids]
        for position in positions:
            members[position // group].append(position % group)
        with clock.stage("rollout"):
            self.task.start_grading(len(positions))
            seed = stream_key(self.recipe.run.seed, [number, turn])
            trajectories, texts, talks = sampled(
                self.engine,
                self.tokenizer,
                self.task,
                self.chats,
                prompts,
                ids,
                members,
                self.sampling,
                seed,
                self.turns,
            )
        with clock.stage("grade"):
            asked = [prompts[t.prompt_index] for t in trajectories]
            grades = self.rewards.grade(self.task, asked, trajectories, texts)
            if talks:
                grades = with_faults(self.task, grades, talks)
                whole = [t.tokens[t.num_prompt_tokens :].tolist() for t in trajectories]  # to be read
                texts = self.tokenizer.batch_decode(whole, skip_special_tokens=True)
        with clock.stage("score"):
            scored = self._score(collate(trajectories, self.rank), number, positions)
        size = sum(t.trace.nbytes for t in trajectories)
        rows = torch.arange(len(trajectories))
        return StepRollout(asked, trajectories, texts, grades, scored, rows, trace_bytes=size, talks=talks)

    def _score(self, sampled: Sampled, number: int, positions: list[int]) -> Scored:
        """Old log-probs, those of the reference, entropies and ranks of the rows of some positions.

        Where the update checks the trajectories of its first minibatch, only one of each minibatch is scored, and
        those that are written for reading: apart, because nothing else may depend on what is written.
        """
        tokens, view = self.recipe.micro_batch_tokens, self.method.view
        packing = packs(self.model, self.recipe.learn.packing)
        reference_view = "dense" if self.recipe.dpo.reference == "dense" else None

        def rows(wanted: Iterable[int]) -> Tensor:
            return torch.tensor([row for row, p in enumerate(positions) if p in {*wanted}], dtype=torch.int64)

        only = None if self.recipe.scores_all else rows(self._drawn(number))
        reference, temperature = self.reference() if self.reference else None, self.sampling.temperature
        scored = score(
            self.model,
            sampled,
            tokens,
            temperature,
            reference,
            view,
            reference_view,
            packing,
            self.critic,
            only=only,
            routing=self.routing,
        )
        if only is None or not samples_due(self.recipe, number + 1):
            return scored
        shown = rows(positions_to_write(self._positions, self.recipe.run.samples))
        return scored.with_shown(
            score(
                self.model,
                sampled,
                tokens,
                temperature,
                view=view,
                packing=packing,
                only=shown,
                routing=self.routing,
            )
        )

    def _drawn(self, number: int) -> list[int]:
        """One position of every minibatch of a step."""
        recipe = self.recipe
        parts = minibatch_rows(self._positions, recipe.learn.minibatches, recipe.rows_together)
        return [
            int(part[stream_key(recipe.run.seed, [number, turn], CHECK_STREAM) % len(part)])
            for turn, part in enumerate(parts)
        ]

    @property
    def _positions(self) -> int:
        """Of a step, over all processes."""
        return self.recipe.rollout.prompts * self.recipe.rollout.group_size

    def _alpha(self, rollout: StepRollout, own_positions: list[int], positions: int) -> dict[int, Tensor]:
        """For `run.diagnose` positions of the step: the overlap of the dense and the sampler's distributions.

        Row i of a process's part was sampled for the i-th of its own positions; replacements come later.
        """
        wanted = self.recipe.run.diagnose
        if not wanted:
            return {}
        chosen = range(0, positions, max(1, positions // wanted))[:wanted]
        with evaluating(self.model):
            return {
                position: overlap(self.model, rollout.trajectories[row], self.sampling.temperature).double().cpu()
                for row, position in enumerate(own_positions)
                if position in chosen
            }

    def complete_held_out(
        self, engine: Engine, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling
    ) -> list[tuple[Trajectory, Grade, Talk | None]]:
        """This process's share of held-out completions; with several processes, one head of each trace."""
        members = [list(range(samples)) if i % self.processes == self.rank else [] for i in range(len(prompts))]
        seed = stream_key(self.recipe.run.seed, [-2])
        trajectories, grades, talks = complete(
            engine, self.tokenizer, task, prompts, samples, sampling, seed, members, self.rewards, self.turns
        )
        if self.processes > 1:
            trajectories = [replace(t, trace=first_head_trace(t.trace)) for t in trajectories]
        told = [replace(talk, messages=[]) for talk in talks] or [None] * len(trajectories)
        return list(zip(trajectories, grades, told, strict=True))

    @property
    def grading_error(self) -> str | None:
        """The first error in a reward, of the task or of what is added to it."""
        return self.task.last_error or self.rewards.last_error

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        ids = starts(self.tokenizer, self.chats, prompts)
        self.budget.check_prompts(ids)
        return ids

    def _stop_ids(self) -> tuple[int, ...]:
        """The tokens that the recipe names, besides the model's own."""
        ids: list[int] = []
        for name in self.recipe.rollout.stop:
            number = self.tokenizer.convert_tokens_to_ids(name)
            if not isinstance(number, int) or number == self.tokenizer.unk_token_id:
                raise SparseRLError(f"rollout.stop names {name!r}, which is not a token of this tokenizer.")
            ids.append(number)
        return tuple(dict.fromkeys([*ids, *stop_ids(self.model, self.tokenizer)]))

    def _reference(self) -> Callable[[], AbstractContextManager[nn.Module]] | None:
        """A function that opens the starting model; None where nothing is held to it."""
        if not self.recipe.keeps_reference:
            return None
        if self.recipe.model.lora_rank:
            from peft import PeftModel

            adapted: nn.Module = self.model
            assert isinstance(adapted, PeftModel)

            @contextmanager
            def without_adapters() -> Iterator[nn.Module]:
                with adapted.disable_adapter():
                    yield adapted

            return without_adapters
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return lambda: nullcontext(frozen)
