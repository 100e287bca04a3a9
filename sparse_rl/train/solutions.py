"""Worked solutions as batches of tokens: prompts as rollouts see them, then the solution and the token that ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import SparseRLError
from ..models import encode
from ..tasks.base import Prompt, Task

Pairs = list[tuple[list[int], list[int]]]  # token ids of prompts, and of their solutions with the end token


def pairs_of(tokenizer: PreTrainedTokenizerBase, task: Task, prompts: Sequence[Prompt], end: int) -> Pairs:
    solutions = [tokenizer.encode(task.solution(prompt), add_special_tokens=False) for prompt in prompts]
    return [(encode(tokenizer, prompt.text), [*ids, end]) for prompt, ids in zip(prompts, solutions)]


def padded(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """tokens int64 [B, T], padded at the end; mask bool [B, T]: the solutions' tokens"""
    longest = max(len(asked) + len(answer) for asked, answer in pairs)
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for i, (asked, answer) in enumerate(pairs):
        tokens[i, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        mask[i, len(asked) : len(asked) + len(answer)] = True
    return tokens, mask


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
            return pairs_of(self.tokenizer, self.task, self.task.sample(step * self.size, self.size), self.end)
        except SparseRLError as error:
            return error

    def made(self, workers: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from step `first` on, in order, padded. Workers make them ahead; they ignore signals, which this
        process handles.
        """
        workers = min(workers, os.cpu_count() or 1)
        forks = workers and "fork" in multiprocessing.get_all_start_methods()
        start = "fork" if forks else None  # tasks need not be picklable
        loader = DataLoader(
            self,
            None,
            sampler=range(first, self.steps),
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_signals,
            multiprocessing_context=start,
        )
        for pairs in loader:
            if isinstance(pairs, SparseRLError):
                raise pairs
            yield padded(pairs)


def _unchanged(pairs: Pairs) -> Pairs:
    return pairs


def _ignore_signals(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
