"""Compute a process's share of a step: complete its prompts on a compressed cache, grade them, and score them with the
same weights.

Nothing here waits for another process, so it may run while the learner works (prefetch.py). What a process samples does
not depend on other processes, because a completion's random numbers follow from its prompt and its position in the
step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import torch

from ..chat import Talk, Turns, with_faults
from ..config import Recipe
from ..errors import SparseRLError
from ..learn.advantage import without_variance
from ..learn.batch import accepted_rows, collate
from ..learn.critic import Critic
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..streams import stream_key
from ..tasks import FAR, Grade, Prompt, Task
from .ask import Asked, Asks, Diagnosis, Done, Here
from .budget import BudgetControl
from .complete import Completer
from .deal import LengthsSeen, deal
from .held_out import chats_of, complete, sampled, starts
from .log import Clock
from .merge import append, first_head_trace
from .rewards import AddedRewards
from .step import StepRollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPARE = FAR // 2  # index of the first prompt that replaces another: beyond those of any run, before held-out ones
MOST_CHECKED = 20_000  # prompts that are encoded and checked before a run begins; each takes about a millisecond


@dataclass(frozen=True)
class Planned:
    """What a process has to do for a step. It is settled when the step is begun, whenever it is carried out."""

    number: int
    version: int  # of the weights to sample with
    prompts: list[Prompt]  # of all processes
    ids: list[list[int]]  # their tokens
    expected: Sequence[float]  # tokens of a completion, by prompt
    own_positions: list[int]  # positions of the step that this process samples for


class Sampler(Completer):
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
        self.task, self.rank, self.processes = task, rank, processes
        rollout = recipe.rollout
        if rollout.prompts < processes:
            raise SparseRLError(
                f"rollout.prompts is {rollout.prompts}, but each of {processes} processes needs at least one; use at "
                f"least {processes}."
            )
        super().__init__(recipe, model, tokenizer, critic)
        self.chats = chats_of(model, tokenizer, task)
        self.turns = Turns(rollout.max_turns, rollout.max_given_tokens)
        self.rewards = AddedRewards(recipe)
        self.rewards.check(task)
        self.budget = BudgetControl(rollout.budget, self.engine)
        self.lengths = LengthsSeen()
        self.asks: Asks = Here(self)
        self.one_at_a_time = Lock()  # several steps may be under way, but tasks and tokenizers serve one thread

    def step(self, number: int, clock: Clock) -> StepRollout:
        """Sample, grade and score this process's prompts of a step, and replace some if the recipe says so."""
        return self.carry_out(self.plan(number, clock), clock)

    def plan(self, number: int, clock: Clock) -> Planned:
        """What this process has to do for a step, with the present weights."""
        count, group = self.recipe.rollout.prompts, self.recipe.rollout.group_size
        with clock.stage("rollout"), self.one_at_a_time:
            prompts = self.task.sample(number * count, count)
            ids = self.encode(prompts)
            expected = self.lengths.expect(prompts, list(map(len, ids)))
            owner_rank = deal(expected, self.recipe.learn.minibatches, self.processes)  # of every prompt
        own_positions = [i * group + j for i in range(count) for j in range(group) if owner_rank[i] == self.rank]
        return Planned(number, self.engine.version, prompts, ids, expected, own_positions)

    def carry_out(self, planned: Planned, clock: Clock) -> StepRollout:
        own_positions, waited = planned.own_positions, self.task.waited
        rollout = self._complete(planned, 0, own_positions, clock)
        if self.recipe.learn.refill:
            rollout = self._refill(rollout, planned, clock)
        if self.recipe.learn.dynamic:
            rollout = self._replace_flat_groups(rollout, planned, clock)
        if not self.asks.scores:
            with clock.stage("diagnose"):
                found = {p: self.diagnose(rollout.trajectories[row]) for row, p in self._diagnosed(own_positions)}
            rollout = with_diagnosis(rollout, found)
        timing = {"talk/wait/seconds": self.task.waited - waited} if self.task.converses else {}
        return replace(rollout, seconds=clock.seconds["rollout"], grading_error=self.grading_error, timing=timing)

    def check_prompts_of_files(self, steps_done: int) -> None:
        """Refuse a run that would stop at a prompt it cannot sample from, if its prompts come from files
        and are known.
        """
        rollout = self.recipe.rollout
        begin = steps_done * rollout.prompts
        whole = self.task.positions_of_all(begin)  # the rest of an epoch and the next one: every prompt
        visited = whole if self.recipe.learn.dynamic else self.recipe.run.steps * rollout.prompts - begin
        count = min(visited, whole, MOST_CHECKED)  # with dynamic sampling any prompt may come up
        refused: list[tuple[int, SparseRLError]] = []
        for start in range(begin, begin + count, 1000):
            prompts = self.task.sample(start, min(1000, begin + count - start))
            with warnings.catch_warnings():  # warnings about long prompts are shown when these are sampled
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

    def _refill(self, rollout: StepRollout, planned: Planned, clock: Clock) -> StepRollout:
        """Sample replacements for rejected trajectories, in up to `learn.refill` rounds."""
        rollout = replace(rollout, accepted=accepted_rows(rollout.scored, self.method.correction))
        for turn in range(1, self.recipe.learn.refill + 1):
            assert rollout.accepted is not None
            rejected = (~rollout.accepted[rollout.chosen_rows]).nonzero()[:, 0]  # indices of own_positions
            if not len(rejected):
                break
            more = self._complete(planned, turn, [planned.own_positions[i] for i in rejected.tolist()], clock)
            good = accepted_rows(more.scored, self.method.correction)
            chosen_rows = rollout.chosen_rows.clone()
            chosen_rows[rejected[good]] = len(rollout.trajectories) + good.nonzero()[:, 0]
            rollout = append(rollout, more, chosen_rows, torch.cat([rollout.accepted, good]))
        return rollout

    def _replace_flat_groups(self, rollout: StepRollout, planned: Planned, clock: Clock) -> StepRollout:
        """Sample other prompts for groups whose rewards are all equal, in up to `learn.dynamic` rounds.

        As published, punishments for length are ignored: a prompt whose answers are all right is replaced. Each round
        has its own prompt for every position of the step, and completes those that are needed, so the prompts do not
        depend on how positions were dealt.
        """
        count, group, rounds = self.recipe.rollout.prompts, self.recipe.rollout.group_size, self.recipe.learn.dynamic
        positions = torch.tensor(planned.own_positions).view(-1, group)
        for turn in range(1, rounds + 1):
            chosen_rows = rollout.chosen_rows.view(-1, group)
            flat = without_variance(self.rewards.whatever_their_length(rollout.grades)[chosen_rows])
            if not flat.any():
                break
            with clock.stage("rollout"), self.one_at_a_time:
                prompts = self.task.sample(SPARE + (planned.number * rounds + turn - 1) * count, count)
                ids = self.encode(prompts)
            others = replace(planned, prompts=prompts, ids=ids, expected=list(map(len, ids)))
            more = self._complete(others, turn, positions[flat].flatten().tolist(), clock)
            rows = torch.arange(len(more.trajectories)).view(-1, group)
            better = ~without_variance(self.rewards.whatever_their_length(more.grades)[rows])
            chosen_rows = chosen_rows.clone()
            chosen_rows[flat.nonzero()[better, 0]] = len(rollout.trajectories) + rows[better]
            rollout = append(rollout, more, chosen_rows.flatten())
        return rollout

    def _complete(self, planned: Planned, turn: int, positions: list[int], clock: Clock) -> StepRollout:
        """Completions for some positions of a step."""
        group, prompts = self.recipe.rollout.group_size, planned.prompts
        members: list[list[int]] = [[] for _ in planned.ids]
        for position in positions:
            members[position // group].append(position % group)
        diagnose = [divmod(p, group) for _, p in self._diagnosed(positions)] if turn == 0 else []
        with clock.stage("rollout"):
            self.task.start_grading(len(positions))
            seed = stream_key(self.recipe.run.seed, [planned.number, turn])
            asks = Asked(planned.ids, members, seed, planned.version, planned.expected, diagnose)
            done, texts, talks = self._sampled(asks, prompts)
            trajectories = done.trajectories
        with clock.stage("grade"), self.one_at_a_time:
            asked = [prompts[t.prompt_index] for t in trajectories]
            grades = self.rewards.grade(self.task, asked, trajectories, texts)
            if talks:
                grades = with_faults(self.task, grades, talks)
                whole = [t.tokens[t.num_prompt_tokens :].tolist() for t in trajectories]  # for people to read
                texts = self.tokenizer.batch_decode(whole, skip_special_tokens=True)
        scored = done.scored
        if scored is None:
            with clock.stage("score"):
                scored = self.score(collate(trajectories, self.rank), planned.number, positions)
        size = sum(t.trace.nbytes for t in trajectories)
        rows = torch.arange(len(trajectories))
        rollout = StepRollout(asked, trajectories, texts, grades, scored, rows, trace_bytes=size, talks=talks)
        return with_diagnosis(rollout, {i * group + j: values for (i, j), values in done.diagnosed.items()})

    def _sampled(self, asks: Asked, prompts: list[Prompt]) -> tuple[Done, list[str], list[Talk]]:
        """Completions, wherever they are sampled, or conversations, which are held in this process; and the texts to
        grade.
        """
        if self.chats is None:
            done = self.asks.complete(asks)
            responses = [t.response_tokens.tolist() for t in done.trajectories]
            with self.one_at_a_time:
                return done, self.tokenizer.batch_decode(responses, skip_special_tokens=True), []
        trajectories, texts, talks = sampled(
            self.engine,
            self.tokenizer,
            self.task,
            self.chats,
            prompts,
            asks.ids,
            asks.members,
            self.sampling,
            asks.seed,
            self.turns,
        )
        return Done(trajectories), texts, talks

    def _diagnosed(self, own_positions: list[int]) -> list[tuple[int, int]]:
        """(row, position) of those `run.diagnose` positions of a step that belong to this process.

        Row i of a process's part was sampled for the i-th of its own positions; replacements come after these.
        """
        wanted, positions = self.recipe.run.diagnose, self._positions
        if not wanted:
            return []
        chosen = range(0, positions, max(1, positions // wanted))[:wanted]
        return [(row, position) for row, position in enumerate(own_positions) if position in chosen]

    def complete_held_out(
        self, engine: Engine, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling
    ) -> list[tuple[Trajectory, Grade, Talk | None]]:
        """This process's share of held-out completions; with several processes, with only one head of each trace."""
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
        """The first error in a reward, whether the task's or one that the run adds."""
        return self.task.last_error or self.rewards.last_error

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        ids = starts(self.tokenizer, self.chats, prompts)
        self.budget.check_prompts(ids)
        return ids


def with_diagnosis(rollout: StepRollout, found: Mapping[int, Diagnosis]) -> StepRollout:
    """A rollout with the diagnoses of some trajectories. found: by position"""
    regret = {position: values for position, (_, values) in found.items() if values is not None}
    return replace(rollout, alpha={position: values for position, (values, _) in found.items()}, regret=regret)
