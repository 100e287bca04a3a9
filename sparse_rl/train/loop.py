"""The training loop: rollouts on a compressed cache, rewards, corrections, updates. `Trainer.step` is the algorithm.

    sparse-rl train tiny-sums --out runs/mine
    sparse-rl train runs/mine --resume

A run is a folder: recipe.yaml, metrics.jsonl, timing.jsonl, samples/, checkpoints/. A step happens wholly or not at
all. A run that was killed continues from its last checkpoint and writes the same metrics as if nothing had happened.

With several processes, all of them run this loop. Each samples, grades, scores and learns from its share; in between
they exchange results (distributed/world.py), so every line here sees the whole step. Only the first process writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tasks
from ..config import Recipe
from ..distributed.world import PEER_LOST, PeerFailed, World, is_lost
from ..errors import SparseRLError
from ..learn.advantage import Credit, advantage, find_estimator
from ..learn.batch import Batch, Scored, apply_correction, make_batches
from ..learn.correct import Corrected
from ..learn.dpo import Pairs, choose_pairs
from ..learn.learner import UpdateResult
from ..learn.shards import copy_weights, shard
from ..learn.student import copied
from ..models import copy_companions, recurrent_kernels, unknown_to_tiny
from ..planning.memory import is_out_of_memory
from ..records import Trajectory
from ..rollout import Sampling
from ..signals import uninterrupted
from ..streams import stream_key
from ..tasks import Task
from ..tasks.answering import Answers, Names, cannot_answer
from .best import measured
from .held_out import described, engines_for, held_out_answers
from .joint import JointScorer
from .log import Clock, Log, NoLog, average
from .merge import merge, without_full_traces
from .metrics import step_answers, step_metrics
from .parts import (
    checkpoint_gradients,
    load_for_training,
    make_critic,
    make_learner,
    make_loss,
    make_students,
    make_tasks,
)
from .pooled import RunPool, end_pool, sampler_timing, start_pool, write_samplers
from .prefetch import make_source
from .progress import Progress, Versions, is_due
from .rewards import PriceWatch
from .samples import positions_to_write, samples_due, write_samples
from .saving import out_of_memory, save, save_after, save_if_best
from .step import StepRollout, with_seen
from .terminal import TerminalTable
from .worker import Sampler

PAIRS_STREAM = 0x9A125  # separates draws of pairs from other random numbers of a step


class Trainer:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        show: bool = True,
        world: World | None = None,
        settle: Callable[[Recipe, Task, Any], Recipe] = lambda recipe, task, tokenizer: recipe,
    ):
        """`settle`: replaces `auto` by values (train/auto.py) once the task and the tokenizer are loaded."""
        self.folder = folder
        self.world = world = world or World()
        self.correction = recipe.learn.resolve_method().correction
        self.loss = make_loss(recipe)
        find_estimator(recipe.learn.advantage)  # raises on a mistake before the run begins
        self.task, self.held_out = make_tasks(recipe)
        self.model, self.tokenizer = load_for_training(recipe)
        self.recipe = recipe = settle(recipe, self.task, self.tokenizer)
        checkpoint_gradients(recipe, self.model)
        divided, ahead = recipe.model.shard and world.size > 1, bool(recipe.rollout.ahead)
        own_weights = divided or (ahead and not recipe.rollout.pool)
        # The sampler's weights are whole, and do not change while the learner's do.
        sampler_model = copied(self.model) if own_weights else self.model
        critic = make_critic(recipe, self.model)
        sampler_critic = copied(critic) if critic is not None and own_weights else critic
        self.sampler = Sampler(recipe, sampler_model, self.tokenizer, self.task, world.rank, world.size, sampler_critic)
        self.price_watch = PriceWatch(self.sampler.rewards.for_length)
        self.pool: RunPool | None = None  # `run` starts it
        self.source = make_source(recipe, self.sampler, self.publish_weights)
        sharded = shard(self.model, world.size) if divided else None
        self.learner = make_learner(recipe, self.loss, self.model, world, sharded, critic)
        self.students = make_students(recipe, sampler_model, world)
        self.scorer = JointScorer(recipe, self.model, sampler_model if divided else self.model, self.sampler, world)
        self.progress = Progress(self.versions)
        self.shown_errors: set[str] = set()  # grading errors and hints that were shown already
        run, title = recipe.run, f"{folder.name} ({recipe.learn.method})"
        self.log = Log(folder, run.trackers, run.project, recipe.to_dict()) if world.first else NoLog()
        self.terminal = TerminalTable(title, run.steps, show and world.first, quiet=not world.first)

    @property
    def steps_done(self) -> int:
        return self.progress.steps

    @property
    def versions(self) -> Versions:
        """How many optimizer steps the learner and each student have made, and how often the scorer was trained."""
        return self.learner.version, *self.students.versions, self.scorer.version

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        recipe, progress = self.recipe, self.progress
        unknown = unknown_to_tiny(self.tokenizer, tasks.first_texts(self.task))
        kernels = recurrent_kernels(self.model.config)
        recurrent = [] if kernels is None else [f"recurrent layers: {kernels}"]
        for line in [*tasks.notices(self.task, self.held_out), *unknown, *recurrent]:
            self.terminal.say(f"sparse-rl: {line}")
        with self.terminal, self.world.stoppable():
            try:
                self.pool = start_pool(recipe, self.sampler, self.world, self.terminal)
                self.publish_weights()
                self.sampler.check_prompts_of_files(progress.steps)
                while True:
                    if self._due(recipe.eval.every) and progress.evaluated != progress.steps:
                        self.evaluate()
                    if progress.steps >= recipe.run.steps:
                        break
                    self.step()
                    if self._due(recipe.run.checkpoint_every):
                        save(self)
            except (KeyboardInterrupt, SparseRLError, RuntimeError) as error:
                save_after(self, error)
                if isinstance(error, RuntimeError) and is_out_of_memory(error):
                    raise out_of_memory(self.recipe, error) from error
                if is_lost(error):
                    raise PeerFailed(PEER_LOST) from error
                raise
            finally:
                end_pool(self.pool)
                self.source.close()
                self.log.close()
                self.task.close()
            save(self)

    def step(self) -> None:
        """One step of the algorithm. Weights and log lines change together, or not at all.

        With view: shadow, the learner replays the sampler's cache in its update. `collect` then scores only a few
        trajectories, unless the recipe needs all of them (`Recipe.scores_all`).
        """
        clock = Clock(self.terminal.show_stage)
        rollout = self.collect(clock)  # sample, grade, and score: log-probs in the learner's view
        corrected = apply_correction(rollout.scored, self.correction, rollout.accepted)
        scored, kept = rollout.scored.rows(rollout.chosen_rows), corrected.rows(rollout.chosen_rows)  # by position
        credit = self.credit(rollout, scored, kept, corrected.accepted)  # advantages, from the group or from a critic
        pairs, found = self.pairs(rollout, corrected.accepted)  # for algorithms that compare completions
        lessons = self.scorer.collect(rollout, credit.advantages, self.progress.steps, clock)  # what evictions cost
        metrics = credit.metrics | found
        with uninterrupted():
            self.progress.begin()
            students = self.teach_students(rollout, clock)  # before the update, from the weights that sampled
            batches = self.batches(scored, kept, credit, pairs, clock)
            updates = self.update(batches, clock)
            rollout = with_seen(rollout, batches, updates)
            metrics |= self.diagnose(rollout, corrected, clock) | students
            metrics |= average([update.metrics for update in updates]) | self.scorer.learn(lessons, clock)
            self.finish_update(clock)  # sampler and students get the new weights and scorer
            evidence = self.sample_evidence(rollout, batches, updates)
            self.progress.commit(self.versions)  # from here on no line waits for other processes
            metrics |= self.sampler.budget.logged("rollout/budget")
            self.sampler.budget.after_step(metrics)
            self.write(metrics, clock, rollout)
            self.keep_samples(rollout, corrected.accepted, batches, evidence)
        self._show_what_is_missing(step_answers(metrics, self.recipe.rollout, self.recipe.distils))
        self._show_idle_cache(rollout, metrics)
        self._show_price(self.price_watch.after(rollout.grades))

    # ---------------------------------------------------------------------------------------------------- its stages

    def collect(self, clock: Clock) -> StepRollout:
        """The completions of this step from all processes, graded and scored."""
        own: list[StepRollout] = []

        def work() -> StepRollout:
            own.append(self.source.take(self.progress.steps, clock))
            return without_full_traces(own[0]) if self.world.size > 1 else own[0]

        self.source.before_take(clock)
        parts = self.world.run_on_all(work)
        parts[self.world.rank] = own[0]
        rollout = merge(parts, self.recipe.rollout.group_size)
        rollout.grades = self.sampler.rewards.settled(rollout.grades)
        self.sampler.lengths.note(rollout.prompts, rollout.trajectories, repeats=self.task.num_prompts is not None)
        for part in parts:
            self._show_grading_error(part.grading_error)
        self.source.start_next(self.progress.steps)
        rollout.timing = dict(own[0].timing)
        if self.world.size > 1:
            rollout.timing |= {"time/exchange": self.world.waited, "processes/idle/frac": self.world.idle}
        return rollout

    def credit(self, rollout: StepRollout, scored: Scored, kept: Corrected, accepted: Tensor) -> Credit:
        """Advantages of each completion or each token. scored, kept: by position; accepted: bool, by row"""
        rewards = rollout.rewards[rollout.chosen_rows]
        return self.learner.objective.credit(lambda: self.advantages(rollout, accepted), rewards, scored, kept)

    def advantages(self, rollout: StepRollout, accepted: Tensor) -> tuple[Tensor, dict[str, float]]:
        """fp64 advantages [N] by position from the group's rewards, and metrics. accepted: bool, by row"""
        learn, chosen = self.recipe.learn, rollout.chosen_rows
        group = torch.arange(len(chosen)) // self.recipe.rollout.group_size
        members = accepted[chosen] if learn.rebaseline else None
        return advantage(rollout.rewards[chosen], group, learn.advantage, members, learn.advantage_eps)

    def pairs(self, rollout: StepRollout, accepted: Tensor) -> tuple[Pairs | None, dict[str, float]]:
        """The pairs of completions that online DPO compares, by position, and metrics. accepted: bool, by row"""
        if self.recipe.learn.algorithm != "online-dpo":
            return None, {}
        chosen = rollout.chosen_rows
        group = torch.arange(len(chosen)) // self.recipe.rollout.group_size
        stopped = torch.tensor([rollout.trajectories[row].finish_reason == "stop" for row in chosen.tolist()])
        stream = stream_key(self.recipe.run.seed, [self.progress.steps], PAIRS_STREAM)
        rule = self.recipe.dpo.pairs
        return choose_pairs(rollout.rewards[chosen], group, accepted[chosen], stopped, rule, stream)

    def diagnose(self, rollout: StepRollout, corrected: Corrected, clock: Clock) -> dict[str, float]:
        """Metrics of what compression did, over everything that was sampled."""
        interval, skipped = self.sampler.engine.compressor.interval, sum(self.task.skipped.values())
        with clock.stage("diagnose"):
            return step_metrics(rollout, corrected, self.correction, interval, skipped, self.recipe.learn)

    def teach_students(self, rollout: StepRollout, clock: Clock) -> dict[str, float]:
        """One optimizer step of every student per minibatch; the teacher is the model that sampled."""
        if not self.students.members:
            return {}
        with clock.stage("students"):
            sampled = rollout.scored.rows(rollout.chosen_rows).sampled
            minibatches = self.recipe.learn.minibatches
            return self.students.learn(self.sampler.model, sampled, minibatches, self.progress.steps)

    def batches(
        self, scored: Scored, kept: Corrected, credit: Credit, pairs: Pairs | None, clock: Clock
    ) -> list[Batch]:
        """One batch per optimizer step, made of the rows that are learned from."""
        count, together = self.recipe.learn.minibatches, self.recipe.rows_together
        with clock.stage("update"):
            return make_batches(
                scored, kept, credit.advantages, self.correction, self.loss, count, pairs, together, credit.returns
            )

    def update(self, batches: list[Batch], clock: Clock) -> list[UpdateResult]:
        """The learner's optimizer steps; none if only students learn. Trajectories that were not scored are checked
        here as long as the weights are those that sampled them.
        """
        if self.recipe.student.freeze_teacher:
            return []
        unscored, version = not self.recipe.scores_all, self.learner.version
        with clock.stage("update"):
            return [self.learner.step(batch, unscored and self.learner.version == version) for batch in batches]

    def finish_update(self, clock: Clock) -> None:
        """Give the new weights to sampler and students; a sampler that is busy gets them later (prefetch.py)."""
        with clock.stage("update"):
            self.source.after_update()
            self.students.follow()

    def publish_weights(self) -> None:
        """Give the sampler the learner's weights, and the compressor's."""
        if self.sampler.model is not self.model:
            copy_weights(self.model, self.sampler.model)
            copy_companions(self.model, self.sampler.model)
            if self.learner.critic is not None and self.sampler.critic is not None:
                copy_weights(self.learner.critic, self.sampler.critic)
        self.sampler.engine.version = version = self.learner.version + self.scorer.version
        if self.pool is not None:
            self.pool.publish(version)

    def write(self, metrics: dict[str, float], clock: Clock, rollout: StepRollout) -> None:
        timing = clock.timing()
        timing["rollout/tokens_per_s"] = sum(len(t.response_tokens) for t in rollout.trajectories) / rollout.seconds
        timing |= sampler_timing(self.sampler.engine, rollout, self.pool) | rollout.timing
        if torch.cuda.is_available():
            timing["memory/peak_bytes"] = float(torch.cuda.max_memory_allocated())
        self.log.write(self.progress.steps, metrics, timing)
        write_samplers(self.pool, self.folder, self.progress.steps)
        self.terminal.show(self.progress.steps, {**metrics, **timing})

    def sample_evidence(
        self, rollout: StepRollout, batches: list[Batch], updates: list[UpdateResult]
    ) -> dict[int, tuple[Trajectory, Tensor]]:
        """If samples are due in this step: by position, some trajectories with their traces and their clipped tokens,
        fetched from the processes that have them.
        """
        if not samples_due(self.recipe, self.progress.steps + 1):
            return {}
        positions = positions_to_write(len(rollout.chosen_rows), self.recipe.run.samples)
        rows, owner_rank = rollout.chosen_rows.tolist(), rollout.scored.sampled.owner_rank
        found = [update.clipped for update in updates] or [torch.zeros_like(batch.mask) for batch in batches]
        clipped = torch.cat(found)  # by position
        own_positions = [p for p in positions if owner_rank[rows[p]] == self.world.rank]
        own = {p: (rollout.trajectories[rows[p]], clipped[p]) for p in own_positions}
        found_by_all = {p: found for part in self.world.gather(own) for p, found in part.items()}
        return {position: found_by_all[position] for position in positions}

    def keep_samples(
        self,
        rollout: StepRollout,
        accepted: Tensor,
        batches: list[Batch],
        evidence: dict[int, tuple[Trajectory, Tensor]],
    ) -> None:
        """Write some completions to samples/."""
        if evidence and self.world.first:
            folder = self.folder / "samples" / f"step-{self.progress.steps:06d}"
            write_samples(folder, rollout, batches, accepted, self.tokenizer, evidence)

    def evaluate(self) -> None:
        """Measure held-out accuracy on the dense cache and on the run's own with its present budget, with the same
        random numbers each time.
        """
        assert self.held_out is not None
        settings, task, sampler, clock = self.recipe.eval, self.held_out, self.sampler, Clock(self.terminal.show_stage)
        prompts = task.sample(0, min(settings.prompts, task.num_prompts or settings.prompts))
        new_tokens = self.recipe.rollout.max_new_tokens
        room = new_tokens + (sampler.turns.room if task.converses else 0)
        sampling = Sampling(new_tokens, settings.temperature, stop_ids=sampler.sampling.stop_ids)
        metrics = sampler.budget.logged("eval/sparse/budget")
        with clock.stage("eval"):
            self.source.wait_idle()
            self.publish_weights()
            engines = engines_for(sampler.engine, self.students.members, sampler.encode(prompts), room)
            for name, make_engine in engines.items():
                ask = partial(sampler.complete_held_out, task=task, prompts=prompts, sampling=sampling)
                parts = self.world.run_on_all(lambda ask=ask, make=make_engine: ask(make(), samples=settings.samples))
                pairs = [pair for part in parts for pair in part]
                pairs.sort(key=lambda pair: (pair[0].prompt_index, pair[0].sample_index))
                grades = sampler.rewards.settled([grade for _, grade, _ in pairs])
                talks = [talk for *_, talk in pairs if talk is not None]
                found = described([t for t, *_ in pairs], grades, prompts, talks)
                self._show_what_is_missing(held_out_answers(found, grades, new_tokens))
                metrics |= {f"eval/{name}/{quantity}": value for quantity, value in found.items()}
            self._show_grading_error(task.last_error)
        self.progress.evaluated = self.progress.steps
        self.log.write(self.progress.steps, metrics, {"time/eval": clock.seconds["eval"]})
        self.terminal.show(self.progress.steps, metrics)
        if (found := measured({"step": self.progress.steps, **metrics})) is not None:
            if said := self.progress.watch(found, len(prompts)):
                self.terminal.say(said)
            save_if_best(self, found)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _due(self, every: int) -> bool:
        return is_due(self.progress.steps, every, self.recipe.run.steps)

    def _show_what_is_missing(self, found: Answers) -> None:
        """Say once that (almost) no completion stops, answers or differs from the others, and what to do about it."""
        template = "task.template, `sparse-rl list templates`" if self.task.template is not None else None
        said = cannot_answer(found, Names("rollout.max_new_tokens", template))
        if said is not None and said[0] not in self.shown_errors:
            self.shown_errors.add(said[0])
            self.terminal.say(f"sparse-rl: after step {self.progress.steps}: {said[1]}")

    def _show_idle_cache(self, rollout: StepRollout, metrics: dict[str, float]) -> None:
        """Say once that nothing was ever evicted, so this is training on a dense cache."""
        compressor, said = self.sampler.engine.compressor, "idle cache"
        idle = compressor.has_budget and compressor.evicts_response and metrics["cache/tokens_saved/frac"] == 0
        if idle and said not in self.shown_errors:
            self.shown_errors.add(said)
            longest = max(len(t.tokens) for t in rollout.trajectories)
            self.terminal.say(
                f"sparse-rl: after step {self.progress.steps}: nothing was evicted, because the longest of "
                f"{len(rollout.trajectories)} trajectories has {longest} tokens and a row has {compressor.budget} + "
                f"{compressor.interval} slots; lower rollout.budget, or nothing about a small cache is learned."
            )

    def _show_price(self, said: str | None) -> None:
        """Say once that right completions earn no more than an empty one."""
        if said is not None and "price" not in self.shown_errors:
            self.shown_errors.add("price")
            self.terminal.say(f"sparse-rl: after step {self.progress.steps}: {said}")

    def _show_grading_error(self, error: str | None) -> None:
        """Show a grader's error once."""
        if error and error not in self.shown_errors:
            self.shown_errors.add(error)
            unscored = ", or the lowest of the step if only the reward model failed," * bool(
                self.recipe.task.reward_model
            )
            self.terminal.say(
                f"sparse-rl: grading failed ({error[:300]}); such completions get reward 0{unscored} and are counted."
            )
