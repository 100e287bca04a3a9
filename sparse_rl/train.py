"""Training: rollouts on a compressed cache, rewards, corrections, updates. The loop in `Trainer.run` is the table of contents.

    sparse-rl train tiny-sums --out runs/mine
    sparse-rl train runs/mine --resume

A run is a folder: recipe.yaml, metrics.jsonl, timing.jsonl, samples/, checkpoints/. A step happens wholly or not at all; a run that
was killed goes on from its last checkpoint and writes the same metrics as if nothing had happened.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from . import tasks
from .beacon import beacon_of
from .checkpoint import find_checkpoints, first_line, load_state, save_checkpoint
from .config import Recipe
from .control import BudgetControl, compressor_of
from .errors import CannotWrite, OutOfMemory, SparseRLError, stoppable, uninterrupted
from .held_out import accuracy, engines_for
from .learn.advantage import advantage
from .learn.batch import Batch, collate, corrected, join, score, weigh
from .learn.correct import Corrected
from .learn.diagnose import gap_metrics, gap_since_eviction, percentiles, rejection_metrics, rollout_metrics
from .learn.learner import Learner
from .learn.loss import k3
from .learn.score import overlap
from .learn.student import Students
from .live import View
from .metrics import Clock, Log, average, read_lines
from .models import encode, evaluating, load_model, with_lora
from .plan import is_out_of_memory
from .records import Trajectory, kv_tokens_saved
from .rollout import Engine, Sampling
from .samples import Rollout, write_samples
from .streams import stream_key
from .tasks import Prompt


class Trainer:
    def __init__(self, recipe: Recipe, folder: Path, show: bool = True):
        self.recipe, self.folder = recipe, folder
        self.method = recipe.learn.how()
        self.how = self.method.correction
        compressor = compressor_of(recipe.rollout)
        loss = recipe.loss
        self.loss = dataclasses.replace(loss, constant=loss.constant or recipe.rollout.max_new_tokens)
        self.task = tasks.make(recipe.task.name, **recipe.task.options)
        self.held_out = (
            tasks.make(recipe.task.name, **{**recipe.task.options, **recipe.eval.options}).held_out() if recipe.eval.every else None
        )
        torch.manual_seed(recipe.run.seed)
        self.model, self.tokenizer = load_model(recipe.model.name, recipe.model.dtype, seed=recipe.run.seed)
        self.model.config.sparse_rl_template = self.task.template  # so that an evaluation asks alike
        self.reference = self._reference()
        if recipe.model.lora_rank:
            if beacon_of(self.model) is not None:
                raise SparseRLError(f"{recipe.model.name} has a beacon, and is trained with all its weights; set model.lora_rank to 0.")
            self.model = with_lora(self.model, recipe.model.lora_rank, recipe.model.lora_alpha)
        if recipe.model.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.enable_input_require_grads() if recipe.model.lora_rank else None
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
        )
        self.students = Students(
            self.model,
            recipe.student,
            recipe.optimizer,
            recipe.learn.micro_batch_tokens,
            recipe.rollout.temperature,
            recipe.run.seed,
            recipe.run.max_skipped,
        )
        self.taught = self.students.versions  # behind the last whole step
        self.engine = Engine(
            self.model,
            compressor=compressor,
            budget=recipe.rollout.max_budget,
            interval=recipe.rollout.interval,
            rows=recipe.rollout.rows,
        )
        self.sampling = Sampling(recipe.rollout.max_new_tokens, recipe.rollout.temperature, stop_ids=self._stop_ids(), for_correction=True)
        self.budget = BudgetControl(recipe.rollout.budget, self.engine)
        self.step = 0  # steps done
        self.updating = False  # some of a step's updates may be done, others not
        self.saved = -1  # the step of the newest checkpoint
        self.told: set[str] = set()  # grader errors shown already
        self.log = Log(folder, recipe.run.trackers, recipe.run.project, recipe.to_dict())
        self.view = View(f"{folder.name} ({recipe.learn.method})", recipe.run.steps, show)

    # ------------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        recipe = self.recipe
        for line in tasks.notices(self.task, self.held_out):
            self.view.say(f"sparse-rl: {line}")
        with self.view, stoppable():
            try:
                while True:
                    if self._due(recipe.eval.every) and not self._evaluated():
                        self.evaluate()
                    if self.step >= recipe.run.steps:
                        break
                    clock = Clock(self.view.now)
                    rollout = self.sample(clock)
                    fixed = corrected(rollout.scored, self.how)
                    advantages, metrics = self.advantages(rollout, fixed.accepted)
                    metrics |= self.diagnose(rollout, fixed, clock)
                    with uninterrupted():  # the weights and the log move together
                        self.updating = True
                        chosen = rollout.scored.rows(rollout.chosen)
                        if self.students.every:
                            with clock.stage("students"):
                                metrics |= self.students.learn(self.model, chosen.sampled, recipe.learn.minibatches, self.step)
                        with clock.stage("update"):
                            batches = weigh(chosen, advantages, self.how, self.loss, recipe.learn.minibatches)
                            metrics |= average([] if recipe.student.late else [self.learner.step(batch) for batch in batches])
                            self.students.follow()
                        self.engine.version, self.taught = self.learner.version, self.students.versions
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
                raise
            finally:
                self.log.close()
                self.task.close()
            self.save()

    # ------------------------------------------------------------------------------------------------------------ its stages

    def sample(self, clock: Clock) -> Rollout:
        """Completions of this step's prompts, graded and scored; rejected ones replaced where the recipe says so."""
        n, group = self.recipe.rollout.prompts, self.recipe.rollout.group_size
        prompts = [p for p in self.task.sample(self.step * n, n) for _ in range(group)]
        rollout = self._complete(prompts[::group], group, 0, clock)
        for turn in range(1, self.recipe.learn.refill + 1):
            rejected = (~corrected(rollout.scored, self.how).accepted[rollout.chosen]).nonzero()[:, 0]
            if not len(rejected):
                break
            more = self._complete([prompts[i] for i in rejected], 1, turn, clock)
            more.trajectories = [  # each takes the place it was sampled for
                dataclasses.replace(t, prompt_index=slot // group, sample_index=slot % group)
                for t, slot in zip(more.trajectories, rejected.tolist())
            ]
            first = len(rollout.trajectories)
            rollout = Rollout(
                rollout.prompts + more.prompts,
                rollout.trajectories + more.trajectories,
                rollout.texts + more.texts,
                rollout.grades + more.grades,
                join(rollout.scored, more.scored),
                rollout.chosen.clone(),
            )
            good = corrected(more.scored, self.how).accepted
            rollout.chosen[rejected[good]] = first + good.nonzero()[:, 0]
        return rollout

    def _complete(self, prompts: list[Prompt], group: int, turn: int, clock: Clock) -> Rollout:
        recipe = self.recipe
        with clock.stage("rollout"):
            ids = self._encode(prompts)
            trajectories = self.engine.generate(ids, group, self.sampling, stream_key(recipe.run.seed, [self.step, turn]))
        with clock.stage("grade"):
            asked = [prompts[t.prompt_index] for t in trajectories]
            texts = self.tokenizer.batch_decode([t.response_tokens for t in trajectories], skip_special_tokens=True)
            grades = self.task.grade(asked, texts)
            self._tell(self.task)
        with clock.stage("score"):
            reference = self.reference() if self.reference else None
            learn, temperature = recipe.learn, recipe.rollout.temperature
            scored = score(self.model, collate(trajectories), learn.micro_batch_tokens, temperature, reference, self.method.view)
        return Rollout(asked, trajectories, texts, grades, scored, torch.arange(len(trajectories)))

    def advantages(self, rollout: Rollout, accepted: Tensor) -> tuple[Tensor, dict[str, float]]:
        learn = self.recipe.learn
        rewards, members = rollout.rewards[rollout.chosen], accepted[rollout.chosen]
        group = torch.arange(len(rewards)) // self.recipe.rollout.group_size
        values, metrics = advantage(rewards, group, learn.advantage, members if learn.rebaseline else None, learn.advantage_eps)
        if learn.shuffle_advantages:
            generator = torch.Generator().manual_seed(stream_key(self.recipe.run.seed, [self.step, -1]) % 2**63)
            values = values[torch.randperm(len(values), generator=generator)]
        return values, metrics

    def diagnose(self, rollout: Rollout, fixed: Corrected, clock: Clock) -> dict[str, float]:
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
                **{f"grade/{verdict.replace(' ', '_')}/count": float(count) for verdict, count in sorted(verdicts.items())},
            }
            if scored.reference_logprobs is not None:
                metrics["old/kl/mean"] = k3(scored.old_logprobs, scored.reference_logprobs)[mask].double().mean().item()
            if self.recipe.learn.refill:
                metrics["reject/replaced/count"] = float((rollout.chosen >= len(rollout.chosen)).sum())
            if self.recipe.run.diagnose:
                metrics |= self._alpha(trajectories[:: max(1, len(trajectories) // self.recipe.run.diagnose)][: self.recipe.run.diagnose])
        return metrics

    def _alpha(self, trajectories: list[Trajectory]) -> dict[str, float]:
        with evaluating(self.model):
            alpha = torch.cat([overlap(self.model, t, self.recipe.rollout.temperature) for t in trajectories]).double().cpu()
        low = percentiles(alpha, torch.tensor([0.05], dtype=torch.float64)).item()
        return {"gap/alpha/p05": low, "gap/alpha/mean": alpha.mean().item()}

    def write(self, metrics: dict[str, float], clock: Clock, rollout: Rollout) -> None:
        timing = clock.timing()
        tokens = sum(len(t.response_tokens) for t in rollout.trajectories)
        timing["rollout/tokens_per_s"] = tokens / timing["time/rollout"]
        timing["cache/bytes/allocated"] = float(self.engine.cache.nbytes + self.engine.scratch.nbytes)
        timing["trace/bytes/total"] = float(sum(t.trace.nbytes for t in rollout.trajectories))
        timing["cache/bytes_saved/frac"] = self.engine.kv_bytes_saved(rollout.trajectories)
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
            for name, engine in engines_for(self.engine, self.students.every, self._encode(prompts), sampling.max_new_tokens).items():
                seed = stream_key(self.recipe.run.seed, [-2])
                found = accuracy(engine(), self.tokenizer, self.held_out, prompts, settings.samples, sampling, seed)
                metrics |= {f"eval/{name}/{quantity}": value for quantity, value in found.items()}
            self._tell(self.held_out)
        self.log.write(self.step, metrics, {"time/eval": clock.seconds["eval"]})
        self.view.show(self.step, metrics)

    def keep_samples(self, rollout: Rollout, batches: list[Batch], accepted: Tensor) -> None:
        wanted = self.recipe.run.samples
        if wanted and (self._due(10) or self._due(self.recipe.eval.every) or self.step == 1):
            write_samples(self.folder / "samples" / f"step-{self.step:06d}", rollout, batches, accepted, self.tokenizer, wanted)

    def save(self) -> None:
        if self.saved == self.step:
            return
        with uninterrupted():
            checkpoints = self.folder / "checkpoints"
            state = {"learner": self.learner.state_dict(), "budget": self.budget.state_dict(), "students": self.students.state_dict()}
            students = {student.name: student.to_save() for student in self.students.every}
            save_checkpoint(checkpoints, self.step, self.model, self.tokenizer, state, self.recipe.run.keep, students)
            self.saved = self.step

    def resume(self) -> None:
        """Go back to the newest checkpoint, or to the start where there is none, and forget what was written after it."""
        found = find_checkpoints(self.folder / "checkpoints")
        if found:
            self.saved, path = found[-1]
            state = load_state(path)
            self.learner.load_state_dict(state["learner"])
            self.step = state["step"]
            self.learner.skipped %= self.recipe.run.max_skipped  # a run that was stopped for skipping gets another chance
            self.engine.version = self.learner.version
            self.budget.load_state_dict(state.get("budget"))
            self.students.load_state_dict(state.get("students", {}))
            self.taught = self.students.versions
        self.log.cut(self.step)
        for folder in (self.folder / "samples").glob("step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and int(number) > self.step:
                shutil.rmtree(folder)
        for unfinished in (self.folder / "checkpoints").glob(".*.partial"):
            shutil.rmtree(unfinished)

    # ------------------------------------------------------------------------------------------------------------ helpers

    def _save_after(self, error: BaseException) -> None:
        """Save before an error ends the run, unless the weights may be between two steps, or writing is what failed."""
        nothing_moved = (self.learner.version, self.students.versions) == (self.engine.version, self.taught)
        untouched = isinstance(error, SparseRLError) and nothing_moved  # refused before an update
        between_steps = self.updating and not untouched
        unexpected = isinstance(error, RuntimeError) and not is_out_of_memory(error)
        if self.step and not between_steps and not unexpected and not isinstance(error, CannotWrite):
            self.save()

    def _encode(self, prompts: list[Prompt]) -> list[list[int]]:
        ids = [encode(self.tokenizer, prompt.text) for prompt in prompts]
        self.budget.check_prompts(ids)
        return ids

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.recipe.run.steps)

    def _evaluated(self) -> bool:
        return any(line["step"] == self.step and "eval/dense/accuracy" in line for line in read_lines(self.log.files["metrics"])[-2:])

    def _stop_ids(self) -> tuple[int, ...] | None:
        """The tokens the recipe names, besides the model's own; None where it names none."""
        names = self.recipe.rollout.stop
        if not names:
            return None
        ids = [self.tokenizer.convert_tokens_to_ids(name) for name in names]
        for name, number in zip(names, ids):
            if number is None or number == self.tokenizer.unk_token_id:
                raise SparseRLError(f"rollout.stop names {name!r}, which is not a token of this tokenizer.")
        own = self.model.generation_config.eos_token_id
        return tuple(dict.fromkeys([*ids, *([own] if isinstance(own, int) else own or [])]))

    def _reference(self):
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

    def _out_of_memory(self, error: Exception) -> OutOfMemory:
        """Memory that ran out while learning; the engine explains its own."""
        learn = self.recipe.learn
        return OutOfMemory(
            f"out of memory while learning ({first_line(error)}); lower learn.micro_batch_tokens (now {learn.micro_batch_tokens}, "
            f"at least one trajectory) or rollout.rows (now {self.recipe.rollout.rows}), or set model.gradient_checkpointing; "
            "`sparse-rl plan --recipe` says what each takes."
        )

    def _tell(self, task) -> None:
        """A grader's error, once."""
        if task.last_error and task.last_error not in self.told:
            self.told.add(task.last_error)
            self.view.say(f"sparse-rl: grading failed ({task.last_error[:300]}); such completions get reward 0 and are counted.")
