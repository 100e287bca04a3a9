"""Warm-up: supervised training on a task's worked solutions, which makes a model that RL can improve.

    sparse-rl warmup tiny-sums-warmup --out models/tiny-sums
    sparse-rl warmup models/tiny-sums --resume

The loss is the mean negative log-prob of the solution's tokens and the end token; tokens of the prompt and of the chat
template do not count. With `model.lora_rank` only adapters are trained, and the model that is written has them merged
into its weights. A warm-up writes an ordinary Hugging Face folder:

    models/NAME/recipe.yaml                  the recipe with every key spelled out
                metrics.jsonl, timing.jsonl  a line per step, and one per evaluation on held-out problems
                checkpoints/                 until it is finished
                config.json, ...             the model, once it is finished
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import tasks
from ..chat import Turns
from ..config import Recipe, load_recipe
from ..errors import CannotWrite, SparseRLError
from ..files import names_code, read_lines, refuse_links_out, write_text, writing
from ..kernels.modules import fused
from ..learn.learner import learning
from ..learn.optimizer import MasterAdamW, OptimizerSettings, check_skipped, count_skipped
from ..learn.packing import pack
from ..learn.score import batch_logprobs
from ..models import ends_of, evaluating, load_merged, set_record, unknown_to_tiny
from ..rollout import Engine, Sampling
from ..signals import stoppable, uninterrupted
from ..tasks import Prompt, Task
from .checkpoint import cleaned_checkpoints, flush, load_state, require_space, restoring, save_checkpoint, save_model
from .held_out import accuracy
from .log import Clock, Log
from .out_of_memory import explained_memory
from .parts import checkpoint_gradients, load_for_training, make_record
from .run import WRITTEN, check_same, folder_lock, vanishing
from .solutions import Batches, Pairs, padded, pairs_of
from .terminal import TerminalTable

_RISE = 20  # steps over which the learning rate rises; then it is constant
_ROOM = 2  # an evaluated response may be this many times as long as the longest held-out solution


def warmup(
    recipe: Recipe, folder: str | Path, resume: bool = False, evaluate: bool = True, show: bool = True
) -> dict[str, float]:
    """Train, write the model to `folder`, and return the results of the last evaluation (empty without one)."""
    folder = Path(folder)
    changes = check_start(recipe, folder, resume)
    task = tasks.make(recipe.task.name, **recipe.task.options)
    asked = held_out_of(recipe) if evaluate else None
    for one in (task, asked.task) if asked else (task,):
        for part in one.members:
            part.solution(part.sample(0, 1)[0])  # raises at once if there are none
    # A finished warm-up may lack its last evaluation.
    model, tokenizer = load_for_training(finished(recipe, folder) if is_finished(folder) else recipe)
    checkpoint_gradients(recipe, model)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder), TerminalTable(f"warm-up on {recipe.task.name}", recipe.warmup.steps, show) as view:
        with nullcontext() if resume else vanishing(folder), explained_memory(recipe, in_pass=False):
            run = Warmup(recipe, folder, task, asked, model, tokenizer, view)
        del model  # only `run` holds it, so that it can be freed when adapters have been merged
        if resume:
            with explained_memory(recipe, in_pass=False):
                run.resume()
        write_text(folder / "recipe.yaml", recipe.to_yaml())
        unknown = unknown_to_tiny(tokenizer, tasks.first_texts(task))
        for line in [*tasks.notices(task, asked and asked.task), *unknown, *changes]:
            view.say(f"sparse-rl: {line}")
        with stoppable():
            run.train()
            return run.evaluate_last()


def check_start(recipe: Recipe, folder: Path, resume: bool) -> list[str]:
    """Refuse to mix up folders or to write outside; returns sentences about what a resumed warm-up changes."""
    refuse_links_out(folder, WRITTEN)
    if resume:
        path = folder / "recipe.yaml"
        return check_same(load_recipe(path), recipe, path, "warmup")
    if folder.exists():
        raise SparseRLError(
            f"{folder} exists already; continue it with --resume, choose another folder with --out, or remove it."
        )
    return []


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the model of a whole warm-up."""
    return (folder / "config.json").is_file()


def finished(recipe: Recipe, folder: Path) -> Recipe:
    """A recipe that loads the model of a finished warm-up. New adapters change nothing until they are trained."""
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, name=str(folder), quantize=None))


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems that a warm-up is evaluated on."""

    task: Task
    prompts: list[Prompt]


def held_out_of(recipe: Recipe) -> HeldOut:
    """The first `eval.prompts` held-out problems. They need solutions, for the loss and to limit responses."""
    options = {**recipe.task.options, **recipe.eval.options}
    held_out = tasks.make(recipe.task.name, **options).held_out()
    prompts = held_out.sample(0, min(recipe.eval.prompts, held_out.num_prompts or recipe.eval.prompts))
    return HeldOut(held_out, prompts)


class Warmup:
    """A warm-up in progress; between calls of its methods it is always after a whole step."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        task: Task,
        asked: HeldOut | None,
        model,
        tokenizer: PreTrainedTokenizerBase,
        view: TerminalTable,
    ):
        self.recipe, self.folder, self.task, self.asked = recipe, folder, task, asked
        self.model, self.tokenizer, self.view = model, tokenizer, view
        self.ends = ends_of(model, tokenizer)
        set_record(model, dataclasses.replace(make_record(recipe, task, self.ends.stops()), method="warmup"))
        settings = OptimizerSettings(lr=recipe.warmup.lr, warmup_steps=_RISE, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizer = MasterAdamW(model.parameters(), settings)
        self.log = Log(folder, recipe.run.trackers, recipe.run.project, recipe.to_dict())
        self.done = self.saved = 0  # steps
        self.updating = False  # whether an optimizer step has begun and not ended, so that weights must not be saved
        self.evaluated = -1  # the step of the last evaluation
        self.merged = False  # whether adapters have been merged into the written model, but not into `model`

    def resume(self) -> None:
        """Go back to the newest checkpoint, or to the start if there is none, and forget what came after it."""
        if is_finished(self.folder):
            lines = read_lines(self.log.files["metrics"])
            self.done = max((line["step"] for line in lines), default=self.recipe.warmup.steps)
            if self.done != self.recipe.warmup.steps:
                raise SparseRLError(
                    f"{self.folder} was finished after {self.done} steps and cannot be continued to warmup.steps "
                    f"{self.recipe.warmup.steps}; start another warm-up from it with --model.name {self.folder}."
                )
        elif found := cleaned_checkpoints(self.folder / "checkpoints"):
            state = load_state(found[-1][1])
            with restoring(found[-1][1]):
                self.optimizer.load_state_dict(state["optimizer"])
            self.done = self.saved = state["step"]
            if self.done > self.recipe.warmup.steps:
                raise SparseRLError(
                    f"{found[-1][1]} is beyond warmup.steps {self.recipe.warmup.steps}; set it to at least {self.done}."
                )
        self.log.cut(self.done)
        evaluations = (x["step"] for x in read_lines(self.log.files["metrics"]) if "eval/dense/accuracy" in x)
        self.evaluated = max(evaluations, default=-1)

    def train(self) -> None:
        """Do all remaining steps and write the model."""
        if is_finished(self.folder):
            self.remove_checkpoints()
            return
        settings = self.recipe.warmup
        require_space(self.folder, sum(3 * m.nbytes for m in self.optimizer.masters) + self.model_bytes)
        if self.asked and settings.eval_every:
            self.view.say(f"every {settings.eval_every} steps and at the end: {self.described}")
        batches = Batches(self.tokenizer, self.task, settings.batch, settings.steps, self.ends.taught())
        made = batches.made(settings.workers, first=self.done)
        try:
            while self.done < settings.steps:
                if self.asked and self.due(settings.eval_every) and self.evaluated != self.done:
                    self.evaluate()
                if self.due(settings.checkpoint_every):
                    self.save()
                self.step(*next(made))
            self.finish()
        except (KeyboardInterrupt, SparseRLError) as error:
            if not isinstance(error, CannotWrite) and not self.updating:
                self.save()
            if isinstance(error, KeyboardInterrupt):
                self.view.say(f"sparse-rl: stopped after {self.done} of {settings.steps} steps; {self.way_on}")
            raise

    def due(self, every: int) -> bool:
        return every > 0 and self.done > 0 and self.done % every == 0

    def step(self, tokens: Tensor, mask: Tensor) -> None:
        clock = Clock()
        with explained_memory(self.recipe):
            loss = _backward(self.model, tokens, mask, self.recipe.micro_batch_tokens)
        with uninterrupted():
            self.updating = True
            with explained_memory(self.recipe, in_pass=False):
                norm, lr = self.optimizer.step(self.done, loss)
            self.updating = False
            check_skipped(
                count_skipped(0, norm),
                1,
                f"warm-up step {self.done + 1}: loss {loss}, gradient norm {norm}; lower warmup.lr (now "
                f"{self.recipe.warmup.lr}).",
            )
            self.done += 1
            metrics = {"warmup/loss": loss, "warmup/grad_norm": norm, "warmup/lr": lr}
            self.log.write(self.done, metrics | {"warmup/tokens": int(mask.sum())}, clock.timing())
        if self.done % 25 == 0:
            self.view.say(f"step {self.done}/{self.recipe.warmup.steps}: loss {loss:.4f}")

    # ------------------------------------------------------------------------------------ evaluation

    @cached_property
    def held_out_pairs(self) -> Pairs:
        assert self.asked is not None
        return pairs_of(self.tokenizer, self.asked.task, self.asked.prompts, self.ends.taught())

    @property
    def longest(self) -> int:
        """Tokens of the longest held-out solution, not counting those that the model only reads."""
        return max(len(pair.answer) - sum(pair.given or ()) for pair in self.held_out_pairs)

    @property
    def new_tokens(self) -> int:
        """Tokens that an evaluated response may have."""
        return min(self.recipe.rollout.max_new_tokens, _ROOM * self.longest)

    @property
    def described(self) -> str:
        """Words that describe an evaluation."""
        short = self.new_tokens < self.longest
        cut = ", so some cannot be given: raise rollout.max_new_tokens" if short else ""
        return (
            f"{len(self.held_out_pairs)} held-out prompts x {self.recipe.eval.samples}, up to {self.new_tokens} new "
            f"tokens each (the longest solution has {self.longest}{cut}); --no-eval omits this"
        )

    def evaluate(self) -> dict[str, float]:
        """Measure the loss of held-out solutions and the accuracy on a dense cache, and log both."""
        assert self.asked is not None
        clock, recipe, asked = Clock(), self.recipe, self.asked
        self.view.show_stage("evaluating")
        with explained_memory(recipe):
            loss = held_out_loss(self.model, *padded(self.held_out_pairs), recipe.micro_batch_tokens)
        rows = min(recipe.rollout.rows, len(asked.prompts) * recipe.eval.samples)
        engine = Engine(self.model, compressor="dense", rows=rows)
        sampling = Sampling(self.new_tokens, recipe.eval.temperature, stop_ids=self.ends.stops())
        turns = Turns(recipe.rollout.max_turns, recipe.rollout.max_given_tokens)
        found = {"loss": loss} | accuracy(
            engine, self.tokenizer, asked.task, asked.prompts, recipe.eval.samples, sampling, recipe.run.seed, turns
        )
        with uninterrupted():
            self.log.write(self.done, {f"eval/dense/{name}": value for name, value in found.items()}, clock.timing())
            self.evaluated = self.done
        about = f"held-out loss {loss:.4f}, accuracy {found['accuracy']:.3f}"
        self.view.say(f"step {self.done}/{recipe.warmup.steps}: {about}")
        if asked.task.last_error:
            self.view.say(
                f"sparse-rl: grading failed ({asked.task.last_error[:300]}); such completions count as wrong."
            )
        return found

    def evaluate_last(self) -> dict[str, float]:
        """Evaluate the finished model, if that is wanted and was not done before."""
        if self.asked is None:
            return {}
        if self.evaluated == self.done:
            line = [x for x in read_lines(self.log.files["metrics"]) if "eval/dense/accuracy" in x][-1]
            return {k.removeprefix("eval/dense/"): v for k, v in line.items() if k.startswith("eval/dense/")}
        self.view.say(f"evaluating the model, which is in {self.folder}: {self.described}")
        try:
            if self.merged:
                self.load_merged_model()
            return self.evaluate()
        except KeyboardInterrupt:
            self.view.say(f"sparse-rl: the evaluation was stopped; {self.folder} holds the model.")
            raise

    # ------------------------------------------------------------------------------------ files

    @property
    def model_bytes(self) -> int:
        """Bytes of the model that is written at the end. Weights of 4 bits, two in a byte, become weights of 16."""
        return sum(p.nbytes * (4 if p.dtype == torch.uint8 else 1) for p in self.model.parameters())

    @property
    def way_on(self) -> str:
        trust = " --trust" if any(map(names_code, self.recipe.may_name_code().values())) else ""
        go_on = f"continue with: sparse-rl warmup {self.folder} --resume{trust}"
        if not self.saved:
            return go_on
        return f"{self.folder}/checkpoints/step-{self.saved:06d} holds the model of that moment; {go_on}"

    def save(self) -> None:
        """Write a checkpoint, unless this step has one already."""
        if self.saved == self.done or is_finished(self.folder):
            return
        self.check_finite()
        with uninterrupted():
            where, state = self.folder / "checkpoints", {"optimizer": self.optimizer.state_dict()}
            save_checkpoint(where, self.done, self.model, self.tokenizer, state, self.recipe.run.keep)
            self.saved = self.done

    def finish(self) -> None:
        """Write the model into the folder, its config last, so that a folder with a config holds a whole model.

        Adapters are merged from files: those of 4-bit weights need the base again, dequantised. Merging takes host
        memory and may fail, so a checkpoint comes first.
        """
        self.check_finite()
        if self.recipe.model.lora_rank:
            self.save()
        partial, adapters = self.folder / ".model.partial", self.folder / ".adapters.partial"
        with uninterrupted(), writing(self.folder):
            for place in (partial, adapters):
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
            if self.recipe.model.lora_rank:
                save_model(adapters, self.model, self.tokenizer)
                save_model(partial, *load_merged(str(adapters), self.recipe.model.dtype))
            else:
                save_model(partial, self.model, self.tokenizer)
            shutil.rmtree(adapters)
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                flush(file)
                os.replace(file, self.folder / file.name)
            partial.rmdir()
            flush(self.folder)
            self.remove_checkpoints()
        self.merged = self.recipe.model.lora_rank > 0

    def load_merged_model(self) -> None:
        """Replace the model by the one that was written, which merging has rounded. The old one is freed first."""
        del self.model
        gc.collect()
        self.model, _ = load_for_training(finished(self.recipe, self.folder))
        self.merged = False

    def check_finite(self) -> None:
        """Refuse to write weights that are not finite."""
        if not self.optimizer.is_finite():
            raise SparseRLError(
                f"the weights are not finite after step {self.done}, so they were not saved; lower warmup.lr (now "
                f"{self.recipe.warmup.lr}), then start again or continue from the last checkpoint with --resume."
            )

    def remove_checkpoints(self) -> None:
        if (self.folder / "checkpoints").exists():
            shutil.rmtree(self.folder / "checkpoints")


def _parts(model, tokens: Tensor, mask: Tensor, micro_batch_tokens: int) -> Iterator[Tensor]:
    """The loss of a batch as a sequence of terms, one for each micro-batch of about equally long rows."""
    device = next(model.parameters()).device
    lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)
    total = mask.sum().item()
    for rows in pack(lengths, micro_batch_tokens):
        rows, width = rows.sort().values, int(lengths[rows].max())
        yield -batch_logprobs(model, tokens[rows, :width].to(device), mask[rows, :width].to(device)).sum() / total


def _backward(model, tokens: Tensor, mask: Tensor, micro_batch_tokens: int) -> float:
    """Accumulate the gradients of one batch; returns its loss."""
    loss = 0.0
    with learning(model), fused(model):
        for part in _parts(model, tokens, mask, micro_batch_tokens):
            part.backward()
            loss += part.item()
    return loss


@torch.no_grad()
def held_out_loss(model, tokens: Tensor, mask: Tensor, micro_batch_tokens: int) -> float:
    with evaluating(model), fused(model):
        return sum(part.item() for part in _parts(model, tokens, mask, micro_batch_tokens))
