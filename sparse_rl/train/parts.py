"""Make the parts of a run from its recipe: tasks, the model to train, the learner and the students."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .. import tasks
from ..beacon import beacon_of
from ..compressors import Compressor, let_choose
from ..compressors.learned import give_scorer
from ..config import Recipe
from ..distributed.world import World
from ..errors import SparseRLError
from ..files import with_file, with_tasks
from ..learn.critic import Critic
from ..learn.learner import Learner
from ..learn.long import use_long_rows
from ..learn.loss import Loss
from ..learn.packing import packs
from ..learn.selective import keeping_products
from ..learn.shards import Sharded
from ..learn.student import Students, copied
from ..models import Record, find_model, is_adapter, load_model, set_record, with_lora
from ..models.routing import Routing, has_experts, routing_of, why_not_replayed
from ..tasks import Task
from .budget import compressor_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_tasks(recipe: Recipe) -> tuple[Task, Task | None]:
    """The task to learn, and the task with held-out prompts to evaluate on (None if nothing is evaluated)."""
    options = recipe.task.options
    task = tasks.make(recipe.task.name, **options)
    if not recipe.eval.every:
        return task, None
    return task, tasks.make(recipe.task.name, **{**options, **recipe.eval.options}).held_out()


def make_record(recipe: Recipe, task: Task, stop_ids: Sequence[int]) -> Record:
    """The record that every training writes into its model: starting model, task and stop tokens."""
    return Record(
        start=recipe.model.name,
        start_seed=recipe.run.seed,
        task=task.full_name or recipe.task.name,
        task_options=with_full_paths({**recipe.task.options, **recipe.eval.options}),
        template=task.template,
        stop_ids=list(stop_ids),
        max_new_tokens=recipe.rollout.max_new_tokens,
        temperature=recipe.eval.temperature,
        max_turns=recipe.rollout.max_turns if task.converses else None,
        max_given_tokens=recipe.rollout.max_given_tokens if task.converses else None,
        logits=recipe.model.logits,
        quantize=recipe.model.quantize,
    )


def make_rollout_record(
    recipe: Recipe, task: Task, stop_ids: Sequence[int], compressor: Compressor, step: int
) -> Record:
    """The record of a reinforcement learning run at a step, which adds the method and the present cache settings."""
    return replace(
        make_record(recipe, task, stop_ids),
        method=recipe.learn.method,
        view=recipe.learn.resolve_method().view,
        step=step,
        compressor=found_anywhere(recipe.rollout.compressor),
        options=recipe.rollout.cache_options,
        budget=compressor.budget if compressor.has_budget else None,
        interval=compressor.interval if compressor.evicts_response else None,
    )


def with_full_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """A task's options with full paths for files that exist here, so that they are found from other folders."""

    def full(file: Any) -> Any:
        return str(Path(file).resolve()) if isinstance(file, str) and Path(file).exists() else file

    options = with_tasks(options, lambda entry: with_full_paths({**entry, "name": found_anywhere(entry["name"])}))
    files = options.get("files")
    if files is None:
        return options
    return {**options, "files": [full(file) for file in files] if isinstance(files, (list, tuple)) else full(files)}


def found_anywhere(name: str) -> str:
    """The name of a compressor or task, with the full path if it names a user's file (FILE.py, FILE.py:CLASS,
    prompt-only:FILE.py).
    """
    return with_file(name, lambda path: path)


def make_loss(recipe: Recipe) -> Loss:
    """The recipe's loss, with dr-grpo's denominator filled in."""
    return replace(recipe.loss, constant=recipe.loss.constant or recipe.rollout.max_new_tokens)


def load_for_training(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train and its tokenizer. The recipe decides, not what an earlier training recorded in the model."""
    settings = recipe.model
    if is_adapter(found := find_model(settings.name)):
        raise SparseRLError(
            f"{settings.name} holds adapters, and training starts from a whole model; write one with: sparse-rl export "
            f"{found} --to FOLDER --merge, and set model.name to FOLDER."
        )
    torch.manual_seed(recipe.run.seed)
    loaded, tokenizer = load_model(
        settings.name, settings.dtype, seed=recipe.run.seed, logits=settings.logits, quantize=settings.quantize
    )
    model = cast("PreTrainedModel", loaded)
    set_record(model, None)
    if settings.lora_rank:
        if beacon_of(model) is not None:
            raise SparseRLError(
                f"{settings.name} has a beacon, so all of its weights must be trained; set model.lora_rank to 0."
            )
        model = cast(
            "PreTrainedModel", with_lora(model, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        )
    let_choose(model, compressor_of(recipe.rollout), recipe.rollout.start_chunk)
    if recipe.scorer.every:
        give_scorer(model, recipe.run.seed)
    return model, tokenizer


def checkpoint_gradients(recipe: Recipe, model: PreTrainedModel) -> None:
    """If the recipe says so, recompute activations in the backward pass: from inputs, which may be kept on the host, or
    only what lies between matrix products.
    """
    if recipe.checkpoints_gradients:
        options: dict[str, Any] = {"use_reentrant": False}
        if recipe.keeps_products:
            rank = max(recipe.model.lora_rank, recipe.student.lora_rank)  # students are copies of the model
            options["context_fn"] = keeping_products(rank)
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5.23
        (enable or model.gradient_checkpointing_enable)(options)
        if recipe.model.lora_rank:
            model.enable_input_require_grads()
    if recipe.offloads_activations:
        use_long_rows(model)


def replayed_routing(recipe: Recipe, model: nn.Module) -> Routing | None:
    """How the learner repeats the choices of a mixture of experts' routers; None if it does not repeat them."""
    wanted = recipe.learn.replay_routing
    if wanted is False or (wanted == "auto" and not has_experts(model)):
        return None
    why = "folds chunks into beacons" if recipe.folds else why_not_replayed(model)
    if why is None:
        return routing_of(model)
    if wanted is True:
        raise SparseRLError(
            f"learn.replay_routing is true, but {recipe.model.name} {why}; set it to auto, so that the learner chooses "
            "the experts itself."
        )
    warnings.warn(
        f"{recipe.model.name} {why}, so its routing is not replayed: the learner chooses experts anew, and where two "
        "are nearly tied its log-probs differ from the sampler's.",
        stacklevel=2,
    )
    return None


def make_critic(recipe: Recipe, model: PreTrainedModel) -> Critic | None:
    """The critic, if the algorithm has one; `model` must still be the starting model."""
    if recipe.learn.algorithm != "ppo":
        return None
    return Critic(model, copied(model) if recipe.has_separate_critic else None)


def make_learner(
    recipe: Recipe, loss: Loss, model: nn.Module, world: World, sharded: Sharded | None, critic: Critic | None = None
) -> Learner:
    method = recipe.learn.resolve_method()
    return Learner(
        model,
        recipe.scheduled_optimizer(),
        recipe.objective(loss),
        micro_batch_tokens=recipe.micro_batch_tokens,
        packing=packs(model, recipe.learn.packing),
        temperature=recipe.rollout.temperature,
        max_skipped=recipe.run.max_skipped,
        distill=method.distill,
        distill_weight=method.distill_weight,
        world=world,
        sharded=sharded,
        critic=critic,
        critic_lr=recipe.ppo.critic_lr or 10 * recipe.optimizer.lr,
        critic_warmup=recipe.ppo.warmup_steps if critic else 0,
    )


def make_students(recipe: Recipe, teacher: nn.Module, world: World) -> Students:
    return Students(
        teacher,
        recipe.student,
        recipe.scheduled_optimizer(),
        recipe.micro_batch_tokens,
        recipe.rollout.temperature,
        recipe.run.seed,
        recipe.run.max_skipped,
        world,
    )
