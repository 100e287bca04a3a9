"""Training: rollouts on a compressed cache, rewards, corrections, updates. The loop in `Trainer.run` is the table of contents.

    sparse-rl train tiny-sums --out runs/mine
    sparse-rl train runs/mine --resume

A run is a folder: recipe.yaml, metrics.jsonl, timing.jsonl, samples/, checkpoints/. A step happens wholly or not at all; a run that
was killed goes on from its last checkpoint and writes the same metrics as if nothing had happened.

With several processes all of them run this loop. Each samples, grades, scores and learns from its share; in between they exchange what
they have (world.py), so that every line here sees the whole step. The first one writes.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from .. import tasks
from ..beacon import beacon_of
from ..config import Recipe
from ..distributed.world import PEER_LOST, PeerFailed, World, is_lost
from ..errors import CannotWrite, OutOfMemory, SparseRLError
from ..files import find_checkpoints, first_line, read_lines
from ..learn.advantage import advantage
from ..learn.batch import Batch, apply_correction, make_batches
from ..learn.correct import Corrected
from ..learn.diagnose import gap_metrics, gap_since_eviction, percentiles, rejection_metrics, rollout_metrics
from ..learn.learner import Disagreement, Learner
from ..learn.loss import k3
from ..learn.shards import publish, shard
from ..learn.student import Students, copied
from ..models import load_model, with_lora
from ..planning.memory import is_out_of_memory
from ..records import kv_tokens_saved
from ..rollout import Sampling
from ..signals import uninterrupted
from ..streams import stream_key
from .checkpoint import load_state, save_checkpoint
from .held_out import described, engines_for
from .log import Clock, Log, NoLog, average
from .merge import merge, without_full_traces
from .prefetch import PrefetchSource, SyncSource
from .samples import places_to_write, write_samples
from .step import StepRollout
from .terminal import TerminalTable
from .worker import Sampler


class Trainer:
    def __init__(self, recipe: Recipe, folder: Path, show: bool = True, world: World | None = None):
        self.recipe, self.folder = recipe, folder
        self.world = world or World()
        self.method = recipe.learn.resolve_method()
        self.how = self.method.correction
        loss = recipe.loss
        self.loss = dataclasses.replace(loss, constant=loss.constant or recipe.rollout.max_new_tokens)
        self.task = tasks.make(recipe.task.name, **recipe.task.options)
        self.held_out = (
            tasks.make(recipe.task.name, **{**recipe.task.options, **recipe.eval.options}).held_out()
            if recipe.eval.every
            else None
        )
        self.model, self.tokenizer = self._load()
        divided = recipe.model.shard and self.world.size > 1
        sampling_model = (
            copied(self.model) if divided or recipe.rollout.ahead else self.model
        )  # whole, and still while others learn
        self.sampler = Sampler(recipe, sampling_model, self.tokenizer, self.task, self.world.rank, self.world.size)
        self.engine, self.sampling, self.budget = self.sampler.engine, self.sampler.sampling, self.sampler.budget
        self.source = (
            PrefetchSource(self.sampler.step, self.engine, recipe.run.steps)
            if recipe.rollout.ahead
            else SyncSource(self.sampler.step)
        )
        self.learner = Learner(
            self.model,
            recipe.optimizer,
            self.loss,
            micro_batch_tokens=recipe.learn.micro_batch_tokens,
            temperature=recipe.rollout.temperature,
            clip_kl=self.how.clip_kl,
            max_skipped=recipe.run.max_skipped,
            distill=self.method.distill,
            distill_weight=0.1 if recipe.learn.distill_weight is None else recipe.learn.distill_weight,
            world=self.world,
            sharded=shard(self.model, self.world.size) if divided else None,
        )
        self.students = Students(
            sampling_model,
            recipe.student,
            recipe.optimizer,
            recipe.learn.micro_batch_tokens,
            recipe.rollout.temperature,
            recipe.run.seed,
            recipe.run.max_skipped,
            self.world,
        )
        self.taught = self.students.versions  # behind the last whole step
        self.step = 0  # steps done
        self.updating = False  # some of a step's updates may be done, others not
        self.done = self.learner.version  # optimizer steps behind the last whole step
        self.saved = -1  # the step of the newest checkpoint
        self.evaluated = -1  # the step of the last evaluation
        self.told: set[str] = set()  # grader errors shown already
        self.log = (
            Log(folder, recipe.run.trackers, recipe.run.project, recipe.to_dict()) if self.world.first else NoLog()
        )
        self.view = TerminalTable(
            f"{folder.name} ({recipe.learn.method})",
            recipe.run.steps,
            show and self.world.first,
            quiet=not self.world.first,
        )

    # ------------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        recipe = self.recipe
        for line in tasks.notices(self.task, self.held_out):
            self.view.say(f"sparse-rl: {line}")
        with self.view, self.world.stoppable():
            try:
                while True:
                    if self._due(recipe.eval.every) and self.evaluated != self.step:
                        self.evaluate()
                    if self.step >= recipe.run.steps:
                        break
                    clock = Clock(self.view.now)
                    rollout = self.sample(clock)
                    fixed = apply_correction(rollout.scored, self.how)
                    advantages, metrics = self.advantages(rollout, fixed.accepted)
                    metrics |= self.diagnose(rollout, fixed, clock)
                    with uninterrupted():  # the weights and the log move together
                        self.updating = True
                        chosen = rollout.scored.rows(rollout.chosen)
                        if self.students.every:
                            with clock.stage("students"):
                                metrics |= self.students.learn(
                                    self.sampler.model, chosen.sampled, recipe.learn.minibatches, self.step
                                )
                        with clock.stage("update"):
                            batches = make_batches(chosen, advantages, self.how, self.loss, recipe.learn.minibatches)
                            metrics |= average(
                                [] if recipe.student.late else [self.learner.step(batch) for batch in batches]
                            )
                            self.source.after_update(self.publish)
                            self.students.follow()
                        self.done, self.taught = self.learner.version, self.students.versions
                        self.step, self.updating = self.step + 1, False
                        metrics |= self.budget.logged("rollout/budget")
                        self.budget.after_step(metrics)
                        self.write(metrics, clock, rollout)
                        self.keep_samples(rollout, batches, fixed.accepted)
                    if self._due(recipe.run.checkpoint_every):
                        self.save()
            except (KeyboardInterrupt, SparseRLError, RuntimeError) as error:
                self._save_after(error)
                if isinstance(error, RuntimeError) and is_out_of_memory(error):
                    raise self._out_of_memory(error) from error
                if is_lost(error):
                    raise PeerFailed(PEER_LOST) from error
                raise
            finally:
                self.source.close()
                self.log.close()
                self.task.close()
            self.save()

    # ------------------------------------------------------------------------------------------------------------ its stages

    def sample(self, clock: Clock) -> StepRollout:
        """This step's completions of all processes, graded and scored."""
        mine: list[StepRollout] = []

        def work() -> StepRollout:
            mine.append(self.source.take(self.step, clock))
            return without_full_traces(mine[0]) if self.world.size > 1 else mine[0]

        parts = self.world.run_on_all(work)
        parts[self.world.rank] = mine[0]
        rollout = merge(parts, self.recipe.rollout.group_size)
        self.sampler.lengths.note(rollout.prompts, rollout.trajectories, repeats=self.task.num_prompts is not None)
        for part in parts:
            self._tell(part.grading_error)
        self.source.start_next(self.step, self.publish)
        rollout.timing = dict(mine[0].timing)
        if self.world.size > 1:
            rollout.timing |= {"time/exchange": self.world.waited, "processes/idle/frac": self.world.idle}
        return rollout

    def publish(self) -> None:
        """The sampler's weights become the learner's."""
        if self.sampler.model is not self.model:
            publish(self.model, self.sampler.model)
        self.engine.version = self.learner.version

    def advantages(self, rollout: StepRollout, accepted: Tensor) -> tuple[Tensor, dict[str, float]]:
        learn = self.recipe.learn
        rewards, members = rollout.rewards[rollout.chosen], accepted[rollout.chosen]
        group = torch.arange(len(rewards)) // self.recipe.rollout.group_size
        values, metrics = advantage(
            rewards, group, learn.advantage, members if learn.rebaseline else None, learn.advantage_eps
        )
        if learn.shuffle_advantages:
            generator = torch.Generator().manual_seed(stream_key(self.recipe.run.seed, [self.step, -1]) % 2**63)
            values = values[torch.randperm(len(values), generator=generator)]
        return values, metrics

    def diagnose(self, rollout: StepRollout, fixed: Corrected, clock: Clock) -> dict[str, float]:
        """What compression did, over everything sampled and the mask before any rejection."""
        scored, trajectories, rewards = rollout.scored, rollout.trajectories, rollout.rewards
        mask = scored.sampled.mask
        with clock.stage("diagnose"):
            verdicts = Counter(g.verdict for g in rollout.grades)
            metrics = {
                **rollout_metrics(trajectories, rewards),
                **gap_metrics(scored.gap, mask, fixed),
                **gap_since_eviction(scored.gap, mask, trajectories, self.engine.compressor.interval),
                **rejection_metrics(mask, fixed, rewards),
                "old/entropy/mean": scored.entropies[mask].double().mean().item(),
                "cache/tokens_saved/frac": kv_tokens_saved(trajectories),
                **({"data/skipped/count": float(skipped)} if (skipped := sum(self.task.skipped.values())) else {}),
                **{
                    f"grade/{verdict.replace(' ', '_')}/count": float(count)
                    for verdict, count in sorted(verdicts.items())
                },
            }
            if scored.reference_logprobs is not None:
                metrics["old/kl/mean"] = k3(scored.old_logprobs, scored.reference_logprobs)[mask].double().mean().item()
            if self.recipe.learn.refill:
                metrics["reject/replaced/count"] = float((rollout.chosen >= len(rollout.chosen)).sum())
            if rollout.alpha:
                alpha = torch.cat(list(rollout.alpha.values()))
                low = percentiles(alpha, torch.tensor([0.05], dtype=torch.float64)).item()
                metrics |= {"gap/alpha/p05": low, "gap/alpha/mean": alpha.mean().item()}
        return metrics

    def write(self, metrics: dict[str, float], clock: Clock, rollout: StepRollout) -> None:
        timing = clock.timing()
        timing["rollout/tokens_per_s"] = sum(len(t.response_tokens) for t in rollout.trajectories) / rollout.seconds
        timing["cache/bytes/allocated"] = float(self.engine.cache.nbytes + self.engine.scratch.nbytes)
        timing["trace/bytes/total"] = float(rollout.trace_bytes)
        timing["cache/bytes_saved/frac"] = self.engine.kv_bytes_saved(rollout.trajectories)
        timing |= rollout.timing
        if torch.cuda.is_available():
            timing["memory/peak_bytes"] = float(torch.cuda.max_memory_allocated())
        self.log.write(self.step, metrics, timing)
        self.view.show(self.step, {**metrics, **timing})

    def evaluate(self) -> None:
        """Held-out accuracy under the dense cache and under the compressor as it is now, with the same random numbers every time."""
        settings, clock = self.recipe.eval, Clock(self.view.now)
        prompts = self.held_out.sample(0, min(settings.prompts, self.held_out.num_prompts or settings.prompts))
        sampling = Sampling(self.recipe.rollout.max_new_tokens, settings.temperature, stop_ids=self.sampling.stop_ids)
        metrics = self.budget.logged("eval/sparse/budget")
        with clock.stage("eval"):
            self.source.wait_idle()
            self.publish()
            ids = self.sampler.encode(prompts)
            for name, engine in engines_for(self.engine, self.students.every, ids, sampling.max_new_tokens).items():
                parts = self.world.run_on_all(
                    lambda make=engine: self.sampler.complete_held_out(
                        make(), self.held_out, prompts, settings.samples, sampling
                    )
                )
                pairs = sorted(
                    (pair for part in parts for pair in part), key=lambda p: (p[0].prompt_index, p[0].sample_index)
                )
                found = described(*map(list, zip(*pairs)))
                metrics |= {f"eval/{name}/{quantity}": value for quantity, value in found.items()}
            self._tell(self.held_out.last_error)
        self.evaluated = self.step
        self.log.write(self.step, metrics, {"time/eval": clock.seconds["eval"]})
        self.view.show(self.step, metrics)

    def keep_samples(self, rollout: StepRollout, batches: list[Batch], accepted: Tensor) -> None:
        if not (self.recipe.run.samples and (self._due(10) or self._due(self.recipe.eval.every) or self.step == 1)):
            return
        places = places_to_write(rollout, self.recipe.run.samples)
        owner, clipped = rollout.scored.sampled.owner, torch.cat([batch.clipped for batch in batches])
        mine = [place for place in places if owner[rollout.chosen[place]] == self.world.rank]
        evidence = {}  # traces and clipped tokens, from the processes that have them
        for part in self.world.run_on_all(
            lambda: {p: (rollout.trajectories[rollout.chosen[p]], clipped[p]) for p in mine}
        ):
            evidence |= part
        if self.world.first:
            folder = self.folder / "samples" / f"step-{self.step:06d}"
            write_samples(
                folder, rollout, batches, accepted, self.tokenizer, {place: evidence[place] for place in places}
            )

    def save(self, world: World | None = None) -> None:
        """`world`: who takes part, if not all processes."""
        if self.saved == self.step:
            return
        with uninterrupted():
            if self.learner.sharded is not None:
                self.source.wait_idle()
                self.publish()
            elif world is None:
                self.learner.check_agreement()
            state = {
                "learner": self.learner.state_dict(),
                "budget": self.budget.state_dict(),
                "students": self.students.state_dict(),
                "lengths": self.sampler.lengths.state_dict(),
            }
            students = {student.name: student.to_save() for student in self.students.every}
            whole = self.model if self.learner.sharded is None else self.sampler.model
            where, keep = self.folder / "checkpoints", self.recipe.run.keep
            save_checkpoint(where, self.step, whole, self.tokenizer, state, keep, students, world or self.world)
            self.saved = self.step

    def resume(self) -> None:
        """Go back to the newest checkpoint, or to the start where there is none, and forget what was written after it."""
        found = self.world.run_on_first(lambda: find_checkpoints(self.folder / "checkpoints"))
        if found:
            self.saved, path = found[-1]
            state = load_state(path, {"learner": self.learner.state_dict()})
            self.learner.load_state_dict(state["learner"])
            self.step = state["step"]
            self.learner.skipped %= (
                self.recipe.run.max_skipped
            )  # a run that was stopped for skipping gets another chance
            self.done = self.learner.version
            self.budget.load_state_dict(state.get("budget"))
            self.publish()
            self.students.load_state_dict(state.get("students", {}))
            self.taught = self.students.versions
            self.sampler.lengths.load_state_dict(state.get("lengths"))
        self.evaluated = self.world.run_on_first(self._forget_what_came_after)

    def _forget_what_came_after(self) -> int:
        """The step of the last evaluation that is left."""
        self.log.cut(self.step)
        for folder in (self.folder / "samples").glob("step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and int(number) > self.step:
                shutil.rmtree(folder)
        for unfinished in (self.folder / "checkpoints").glob(".*.partial"):
            shutil.rmtree(unfinished)
        return max(
            (line["step"] for line in read_lines(self.log.files["metrics"]) if "eval/dense/accuracy" in line),
            default=-1,
        )

    # ------------------------------------------------------------------------------------------------------------ helpers

    def _load(self):
        """The model to train, and its tokenizer."""
        settings = self.recipe.model
        torch.manual_seed(self.recipe.run.seed)
        model, tokenizer = load_model(settings.name, settings.dtype, seed=self.recipe.run.seed, logits=settings.logits)
        model.config.sparse_rl_template = self.task.template  # so that an evaluation asks alike
        if settings.lora_rank:
            if beacon_of(model) is not None:
                raise SparseRLError(
                    f"{settings.name} has a beacon, and is trained with all its weights; set model.lora_rank to 0."
                )
            model = with_lora(model, settings.lora_rank, settings.lora_alpha)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads() if settings.lora_rank else None
        return model, tokenizer

    def _save_after(self, error: BaseException) -> None:
        """Save before an error ends the run, unless the weights may be between two steps or differ, or writing is what failed.

        When a run is stopped, all processes are here, and none leaves before it is saved: launchers end the others when one has ended.
        After an error others may be gone. Where the first one has everything, it saves alone; shards are then lost.
        """
        nothing_moved = (self.learner.version, self.students.versions) == (self.done, self.taught)
        untouched = isinstance(error, SparseRLError) and nothing_moved  # refused before an update
        between_steps = self.updating and not untouched
        unexpected = isinstance(error, RuntimeError) and not is_out_of_memory(error)
        if not self.step or between_steps or unexpected or isinstance(error, (CannotWrite, Disagreement)):
            return
        if isinstance(error, KeyboardInterrupt):
            with uninterrupted():  # by whoever asks twice
                self.world.stop = False
                if self.learner.sharded is not None:
                    self.source.close()  # or shards would wait for all that is sampled ahead
                self.save()
        elif self.learner.sharded is None:
            self.save(World() if self.world.first else World(self.world.rank))

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.recipe.run.steps)

    def _out_of_memory(self, error: Exception) -> OutOfMemory:
        """Memory that ran out while learning; the engine explains its own."""
        learn = self.recipe.learn
        return OutOfMemory(
            f"out of memory while learning ({first_line(error)}); lower learn.micro_batch_tokens (now {learn.micro_batch_tokens}, "
            f"at least one trajectory) or rollout.rows (now {self.recipe.rollout.rows}), or set model.gradient_checkpointing; "
            "`sparse-rl plan --recipe` says what each takes."
        )

    def _tell(self, error: str | None) -> None:
        """A grader's error, once."""
        if error and error not in self.told:
            self.told.add(error)
            self.view.say(f"sparse-rl: grading failed ({error[:300]}); such completions get reward 0 and are counted.")
