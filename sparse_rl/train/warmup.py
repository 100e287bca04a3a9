"""Warm-up: supervised training on a task's worked solutions, to make a small model that RL can improve.

    sparse-rl warmup tiny-sums-warmup --out models/tiny-sums

The loss is the mean negative log-prob of the solution's tokens and the end token. Warm-up writes an ordinary Hugging
Face folder, with the recipe beside the model.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from .. import tasks
from ..config import Recipe
from ..errors import SparseRLError
from ..files import writing
from ..learn.batch import pack
from ..learn.learner import learning
from ..learn.optimizer import MasterAdamW, OptimizerSettings, check_skipped, count_skipped
from ..learn.score import batch_logprobs
from ..models import encode, ends_of, load_model, set_record
from ..rollout import Engine, Sampling
from ..signals import stoppable, uninterrupted
from ..tasks.base import Task
from .checkpoint import save_model
from .held_out import accuracy
from .parts import make_record
from .terminal import TerminalTable

_RISE = 20  # steps over which the learning rate rises; constant afterwards


def warmup(recipe: Recipe, folder: str | Path, show: bool = True) -> dict[str, float]:
    """Train, write the model to `folder`, and return its accuracy on held-out prompts."""
    folder, settings = Path(folder), recipe.warmup
    if folder.exists():
        raise SparseRLError(f"{folder} exists already; choose another folder with --out, or remove it.")
    if recipe.model.lora_rank:
        raise SparseRLError(
            f"model.lora_rank is {recipe.model.lora_rank}, but warm-up trains all weights; set it to 0."
        )
    task = tasks.make(recipe.task.name, **recipe.task.options)
    torch.manual_seed(recipe.run.seed)
    model, tokenizer = load_model(
        recipe.model.name, recipe.model.dtype, seed=recipe.run.seed, logits=recipe.model.logits
    )
    ends = ends_of(model, tokenizer)
    set_record(model, replace(make_record(recipe, task, ends.stops()), method="warmup"))
    adamw = OptimizerSettings(lr=settings.lr, warmup_steps=_RISE, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = MasterAdamW(model.parameters(), adamw)
    done, batches = 0, Batches(tokenizer, task, settings.batch, settings.steps, ends.taught())
    with TerminalTable(f"warm-up on {recipe.task.name}", settings.steps, show) as view, stoppable():
        try:
            for tokens, mask in batches.made(settings.workers):
                loss = _backward(model, tokens, mask, recipe.learn.micro_batch_tokens)
                with uninterrupted():
                    norm, _ = optimizer.step(done, loss)
                    done += 1
                stop = f"warm-up step {done}: loss {loss}, gradient norm {norm}; lower warmup.lr (now {settings.lr})."
                check_skipped(count_skipped(0, norm), 1, stop)
                if done % 25 == 0:
                    view.say(f"step {done}/{settings.steps}: loss {loss:.4f}")
        except KeyboardInterrupt:
            _write(folder, model, tokenizer, recipe)
            view.say(
                f"sparse-rl: interrupted after {done} of {settings.steps} steps; {folder} holds the model of that "
                "moment."
            )
            raise
    _write(folder, model, tokenizer, recipe)
    held_out = task.held_out()
    prompts = held_out.sample(0, min(recipe.eval.prompts, held_out.num_prompts or recipe.eval.prompts))
    engine = Engine(model, compressor="dense", rows=recipe.rollout.rows)
    sampling = Sampling(recipe.rollout.max_new_tokens, recipe.eval.temperature, stop_ids=ends.stops())
    return accuracy(engine, tokenizer, held_out, prompts, recipe.eval.samples, sampling, recipe.run.seed)


Pairs = list[tuple[list[int], list[int]]]  # token ids of prompts, and of their solutions with the end token


@dataclass(frozen=True)
class Batches(Dataset):
    """The batches of a warm-up by step. A task's error is returned as a value: a worker process could not raise it as
    one sentence.
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    size: int
    steps: int
    end: int  # the token that ends a solution

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Pairs | SparseRLError:
        try:
            prompts = self.task.sample(step * self.size, self.size)
            solutions = [self.tokenizer.encode(self.task.solution(p), add_special_tokens=False) for p in prompts]
        except SparseRLError as error:
            return error
        return [(encode(self.tokenizer, p.text), [*ids, self.end]) for p, ids in zip(prompts, solutions)]

    def made(self, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches in order, padded. Workers make them ahead; they ignore signals, which this process handles."""
        workers = min(workers, os.cpu_count() or 1)
        forks = workers and "fork" in multiprocessing.get_all_start_methods()
        start = "fork" if forks else None  # tasks need not be picklable
        loader = DataLoader(
            self,
            None,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_signals,
            multiprocessing_context=start,
        )
        for pairs in loader:
            if isinstance(pairs, SparseRLError):
                raise pairs
            yield _padded(pairs)


def _unchanged(pairs: Pairs) -> Pairs:
    return pairs


def _ignore_signals(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _padded(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """tokens int64 [B, T], padded at the end; mask bool [B, T]: the solutions' tokens"""
    longest = max(len(asked) + len(answer) for asked, answer in pairs)
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for i, (asked, answer) in enumerate(pairs):
        tokens[i, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        mask[i, len(asked) : len(asked) + len(answer)] = True
    return tokens, mask


def _backward(model, tokens: Tensor, mask: Tensor, micro_batch_tokens: int) -> float:
    """Accumulate the gradients of one batch over micro-batches of about equally long rows; returns its loss."""
    device = next(model.parameters()).device
    lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)
    total, loss = mask.sum().item(), 0.0
    with learning(model):
        for rows in pack(lengths, micro_batch_tokens):
            rows, width = rows.sort().values, int(lengths[rows].max())
            part = -batch_logprobs(model, tokens[rows, :width].to(device), mask[rows, :width].to(device)).sum() / total
            part.backward()
            loss += part.item()
    return loss


def _write(folder: Path, model, tokenizer, recipe: Recipe) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(folder):
        partial.mkdir(parents=True)
        save_model(partial, model, tokenizer)
        (partial / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        os.rename(partial, folder)
