"""Run folders: start a run or continue one.

runs/NAME/recipe.yaml      the recipe with every key spelled out
         chosen.yaml       what was chosen for its keys that are `auto`, if there are any
         metrics.jsonl     one line per step: what was learned
         timing.jsonl      one line per step: how long it took
         pool.json         where the samplers of a pool are, and what they have done (rollout.pool)
         samples/          completions to read, with the evidence of every token and their traces
         checkpoints/      the newest few, each an ordinary Hugging Face folder
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ..chat import Turns
from ..config import Recipe, earlier_values, load_recipe, migrate, missing_keys, read_yaml_file
from ..distributed.world import World
from ..errors import SparseRLError, shown
from ..files import not_through_links, refuse_links_out, write_text, writing
from ..learn.support import MOST
from ..models import (
    ModelShape,
    adapted_layers,
    dtype_of,
    load_config,
    quantised_bytes,
    reward_config,
    weight_bytes,
)
from ..models.routing import routing_from
from ..planning.memory import make_plan
from ..planning.training import TrainingPlan, classifier_bytes, make_training_plan
from ..tasks import Task, may_converse
from . import auto, pooled
from .budget import compressor_of
from .checkpoint import require_space
from .loop import Trainer
from .saving import resume as resume_run

WRITTEN = (  # files in a run's folder
    *("recipe.yaml", "metrics.jsonl", "timing.jsonl", pooled.WRITTEN, auto.CHOSEN, "samples", "checkpoints", ".lock"),
)


def train(
    recipe: Recipe, folder: str | Path, resume: bool = False, show: bool = True, world: World | None = None
) -> Trainer:
    """Make a run folder, or continue with one, and train to the end.

    With several processes, all of them call this, and only the first one writes.
    """
    folder, world = Path(folder), world or World()
    if any(part.exists() and not part.is_dir() for part in (folder, *folder.parents)):
        raise SparseRLError(f"{folder} is a file or lies under one; a run needs a folder.")
    recipe = with_values(recipe, world.run_on_first(lambda: as_begun(recipe, folder) if resume else {}))
    world.run_on_first(lambda: check_folder(folder, recipe, resume))
    before = world.run_on_first(lambda: auto.recorded(folder, recipe) if resume else {})
    made: list[Trainer] = []
    world.run_on_all(
        lambda: made.append(Trainer(with_values(recipe, before), folder, show, world, partial(settle, world.size)))
    )
    (trainer,) = made
    chosen = {key: auto.settings_of(trainer.recipe)[key] for key in auto.auto_keys(recipe)}
    with ExitStack() as held:

        def begin() -> list[str]:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(folder_lock(folder))
            held.enter_context(vanishing(folder) if not resume else nullcontext())
            require_space(folder, checkpoint_bytes(trainer))
            return check_folder(folder, recipe, resume)  # again: another process may have come meanwhile

        changes = world.run_on_first(begin)
        translated = world.run_on_first(lambda: translated_keys(folder) if resume else [])
        if resume:
            resume_run(trainer)
            world.run_on_first(lambda: check_steps(trainer))
        world.run_on_first(lambda: write_text(folder / "recipe.yaml", recipe.to_yaml()))
        if chosen:
            world.run_on_first(lambda: write_text(folder / auto.CHOSEN, yaml_of(chosen)))
        if chosen != before:
            tokens = auto.longest_prompt(trainer.task, trainer.tokenizer)
            planned = plan_run(trainer.recipe, tokens, world.size).total_bytes
            trainer.terminal.say(f"sparse-rl: {auto.said(chosen, planned, auto.device_memory())}")
        for note in translated:
            trainer.terminal.say(f"sparse-rl: recipe.yaml was written by an earlier version: {note}")
        for change in changes:
            trainer.terminal.say(f"sparse-rl: from step {trainer.steps_done} on, {change}")
        trainer.run()
    return trainer


def check_steps(trainer: Trainer) -> None:
    """Refuse fewer steps than a resumed run has, and say so if it has all of them."""
    done, steps = trainer.steps_done, trainer.recipe.run.steps
    if done > steps:
        raise SparseRLError(f"run.steps is {steps}, but {trainer.folder} has {done} steps already; raise or omit it.")
    if done == steps:
        trainer.terminal.say(f"sparse-rl: this run has all of its {steps} steps; --run.steps makes it longer.")


def settle(processes: int, recipe: Recipe, task: Task, tokenizer) -> Recipe:
    """A recipe with values in place of `auto`: the fastest whose plan fits the GPU, or the defaults without a GPU."""
    memory = auto.device_memory()
    if not auto.auto_keys(recipe):
        return recipe
    if memory is None:
        return with_values(recipe, auto.choose(recipe, None))
    return with_values(recipe, choose_for(recipe, auto.longest_prompt(task, tokenizer), memory, processes))


def choose_for(recipe: Recipe, prompt_tokens: int, memory: int, processes: int = 1) -> dict[str, Any]:
    """Values for `auto` on a GPU with this many bytes."""
    return auto.choose(recipe, lambda keys: plan_run(with_values(recipe, keys), prompt_tokens, processes).fits(memory))


def yaml_of(values: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False)


def translated_keys(folder: Path) -> list[str]:
    """One sentence for every key that an earlier version wrote differently into the folder's recipe."""
    data = read_yaml_file(folder / "recipe.yaml")
    added = [f"{key} is a new key; this run keeps {value}: {why}." for key, (value, why) in missing_keys(data).items()]
    return migrate(data)[1] + added


def as_begun(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Values with which a run of an earlier version goes on: keys that did not exist when it was begun do what that
    version did, unless the recipe sets them to something else.
    """
    path = folder / "recipe.yaml"
    data = read_yaml_file(path) if path.is_file() else None
    kept = earlier_values(data) if isinstance(data, dict) else {}
    return {key: value for key, value in kept.items() if has_default(recipe, key)}


def has_default(recipe: Recipe, key: str) -> bool:
    section, _, name = key.partition(".")
    part = getattr(recipe, section)
    return getattr(part, name) == part.__dataclass_fields__[name].default


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A recipe with other values for some keys (`section.key`)."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        recipe = dataclasses.replace(
            recipe, **{section: dataclasses.replace(getattr(recipe, section), **{name: value})}
        )
    return recipe


def checkpoint_bytes(trainer: Trainer) -> int:
    """Bytes of a checkpoint: masters and two moments of trained weights, the model, and its students' weights."""
    learners = [trainer.learner, *trainer.students.members]
    masters = sum(m.nbytes for learner in learners for m in learner.optimizer.masters)
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    students = sum(p.nbytes for student in trainer.students.members for p in student.model.parameters())
    return 3 * masters + trained + students


def check_folder(folder: Path, recipe: Recipe, resume: bool) -> list[str]:
    """Refuse to mix up runs or to write outside the folder; returns sentences about what a resumed run changes."""
    refuse_links_out(folder, WRITTEN)
    if resume:
        before = load_recipe(folder / "recipe.yaml")
        before = with_values(before, as_begun(before, folder))
        return check_same(before, recipe, folder / "recipe.yaml")
    if any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl", "checkpoints")):
        raise SparseRLError(
            f"{folder} holds a run already; continue it with --resume (sparse-rl train {folder} --resume), or choose "
            "another folder with --out."
        )
    return []


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; the lock ends with the process, however that ends."""
    with writing(folder / ".lock"):
        file = open(folder / ".lock", "a+", opener=not_through_links)  # noqa: SIM115 (closed below)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SparseRLError(
                f"another process is training in {folder}; wait for it, or choose another folder with --out."
            ) from error
        yield


@contextmanager
def vanishing(folder: Path) -> Iterator[None]:
    """If a run is refused before its first result, remove its folder, so that the next attempt can start."""
    try:
        yield
    except SparseRLError:
        if not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            with suppress(OSError):  # the user must read the refusal, not this
                for name in ("recipe.yaml", auto.CHOSEN):
                    (folder / name).unlink(missing_ok=True)
                (folder / ".lock").unlink(missing_ok=True)
                folder.rmdir()
        raise


def plan_run(recipe: Recipe, prompt_tokens: int, processes: int = 1) -> TrainingPlan:
    """Predict the memory that a recipe's run takes in each of its processes, from the model's config alone."""
    method = recipe.learn.resolve_method()
    config = load_config(recipe.model.name)
    shape = ModelShape.of(config, dtype_of(recipe.model.dtype))
    parameters = weight_bytes(config, shape.dtype) // shape.dtype.itemsize
    weights = quantised_bytes(config, shape.dtype) if recipe.model.quantize else parameters * shape.dtype.itemsize
    routing = routing_from(config) if recipe.learn.replay_routing else None
    support = min(MOST, shape.vocabulary)
    rollout = make_plan(
        shape,
        compressor_of(recipe.rollout),
        rows=recipe.rollout.rows,
        prompt_tokens=prompt_tokens,
        new_tokens=recipe.rollout.max_new_tokens + given_room(recipe),
        weight_bytes=weights,
        adapters=recipe.model.lora_rank > 0,
        routing=routing if method.view == "shadow" else None,
        room={None: None, "margins": 0, "ids": support}[recipe.records_support],
    )
    plan = make_training_plan(
        rollout,
        shape,
        trained=trained_parameters(config, recipe) or parameters,
        micro_batch_tokens=recipe.micro_batch_tokens,
        trajectories=math.ceil(recipe.rollout.prompts / processes) * recipe.rollout.group_size,
        minibatches=recipe.learn.minibatches,
        checkpointing=recipe.checkpoints_gradients,
        keeps_products=recipe.keeps_products,
        long_rows=recipe.offloads_activations,
        reference=recipe.keeps_reference and not recipe.model.lora_rank,
        evaluates=recipe.eval.every > 0,
        shadow=method.view == "shadow" or bool(recipe.student.chunks),
        distills=method.distill is not None,
        students=len(recipe.student.chunks),
        student_trained=lora_parameters(config, recipe.student.lora_rank) if recipe.student.lora_rank else parameters,
        processes=processes,
        shard=recipe.model.shard,
        ahead=bool(recipe.rollout.ahead) and recipe.rollout.pool is None,  # a pool's samplers have their own weights
        critic=recipe.has_separate_critic,
        offload=recipe.optimizer.offload,
        reward_model=reward_model_bytes(recipe, prompt_tokens, math.ceil(recipe.rollout.prompts / processes)),
        routes=routing.token_bytes if routing else 0,
        support=support if recipe.records_support else 0,
    )
    return plan.with_samplers(samplers_beside(recipe), scores=bool(recipe.rollout.ahead))


def samplers_beside(recipe: Recipe) -> int:
    """How many samplers of a pool share the learner's GPU. `ray` spreads them over all GPUs of this machine; with the
    address of a cluster they are elsewhere.
    """
    if recipe.rollout.pool != "ray":
        return 0
    return max(1, math.ceil(recipe.rollout.samplers / max(1, torch.cuda.device_count())))


def given_room(recipe: Recipe) -> int:
    """Tokens that a task may give in a conversation. Only its name is looked at, so a user's file counts as 0."""
    if not may_converse(recipe.task.name, recipe.task.options):
        return 0
    return Turns(recipe.rollout.max_turns, recipe.rollout.max_given_tokens).room


def reward_model_bytes(recipe: Recipe, prompt_tokens: int, prompts: int) -> tuple[int, int]:
    """Bytes of the reward model's weights and of a forward pass, assuming as many tokens per text as for the policy."""
    from transformers import AutoModelForSequenceClassification

    if recipe.task.reward_model is None:
        return 0, 0
    config = reward_config(recipe.task.reward_model)
    text, weights = config.get_text_config(), weight_bytes(config, kind=AutoModelForSequenceClassification)
    longest = prompt_tokens + recipe.rollout.max_new_tokens
    tokens = max(longest, min(recipe.task.reward_model_tokens, prompts * recipe.rollout.group_size * longest))
    intermediate = getattr(text, "intermediate_size", 4 * text.hidden_size)
    item = (config.dtype or torch.float32).itemsize
    return weights, classifier_bytes(text.hidden_size, intermediate, item, tokens, longest)


def lora_parameters(config, rank: int, targets: Sequence[str] = ()) -> int:
    """Parameters of adapters, counted on a model without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    return rank * sum(sum(cast(Any, m).weight.shape) for m in adapted_layers(skeleton, targets).values())


def trained_parameters(config, recipe: Recipe) -> int | None:
    """Parameters of a run's adapters; None: it trains all weights."""
    rank = recipe.model.lora_rank
    return lora_parameters(config, rank, recipe.model.lora_targets) if rank else None


FREE_TO_CHANGE = {
    *("run.steps", "run.checkpoint_every", "run.keep", "run.trackers", "run.project", "run.max_skipped"),
    *("rollout.pool", "rollout.samplers", "rollout.over_ask", "rollout.patience"),  # they change no completion
    *("warmup.steps", "warmup.checkpoint_every", "warmup.eval_every", "warmup.workers"),
}
CHANGEABLE_ON_RESUME = {
    "optimizer.lr",
    "warmup.lr",
    "student.lr",
    "ppo.critic_lr",
    "rollout.rows",
    "rollout.budget",
    "rollout.layer_budgets",
    "rollout.ahead",
    "learn.micro_batch_tokens",
    "model.gradient_checkpointing",
    "model.shard",
    "optimizer.offload",
}


def check_same(old: Recipe, new: Recipe, path: Path, command: str = "train") -> list[str]:
    """Refuse a recipe that differs from the run's own, except in keys that may change; returns sentences about those.

    `command`: the command that resumes the run
    """
    before, now, changes = old.to_dict(), new.to_dict(), []
    for section in before:
        for name in {**before[section], **now[section]}:
            key, then, given = f"{section}.{name}", before[section].get(name), now[section].get(name)
            if key in FREE_TO_CHANGE or then == given:
                continue
            if key not in CHANGEABLE_ON_RESUME:
                raise SparseRLError(
                    f"{key} is {shown(given)} but {path} says {shown(then)}; resume with the recipe of the run "
                    f"(sparse-rl {command} {path.parent} --resume), or start another run."
                )
            changes.append(f"{key} is {shown(given)} instead of {shown(then)}.")
    ends = [recipe.scheduled_optimizer().decay_steps for recipe in (old, new)]
    if ends[0] != ends[1]:  # the run's length changed
        changes.append(
            f"the learning rate falls to 0 at optimizer step {ends[1]} instead of {ends[0]}, because run.steps is "
            f"{new.run.steps} instead of {old.run.steps}; optimizer.decay_steps would have fixed it."
        )
    return changes
