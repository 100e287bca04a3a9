"""Turn worked solutions into batches of tokens: the prompt as rollouts see it, the solution, and the end token."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from ..chat import Chats, first_messages
from ..errors import SparseRLError
from ..models import encode
from ..tasks import Message, Prompt, Task


class Pair(NamedTuple):
    """Token ids of a prompt and of its solution, end token included."""

    asked: list[int]
    answer: list[int]
    given: list[bool] | None = None  # in a conversation: which tokens of the answer the model only reads


Pairs = list[Pair]


def pairs_of(tokenizer: PreTrainedTokenizerBase, task: Task, prompts: Sequence[Prompt], end: int) -> Pairs:
    chats = Chats(tokenizer, task, end)
    return [_pair(tokenizer, chats, prompt, task.solution(prompt), end) for prompt in prompts]


def _pair(tokenizer, chats: Chats, prompt: Prompt, solution: str | list[Message], end: int) -> Pair:
    if isinstance(solution, str):
        return Pair(encode(tokenizer, prompt.text), [*tokenizer.encode(solution, add_special_tokens=False), end])
    chat, messages = chats.of(prompt), first_messages(prompt)
    answer: list[int] = []
    given: list[bool] = []
    for is_own, group in groupby(solution, lambda message: message["role"] == "assistant"):
        turn = list(group)
        ids = [i for message in turn for i in chat.said(messages, message)] if is_own else chat.given(messages, turn)
        messages, answer, given = messages + turn, answer + ids, given + [not is_own] * len(ids)
    return Pair(chat.start(prompt), answer, given)


def padded(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """tokens int64 [B, T], padded at the end; mask bool [B, T]: the tokens that the model learns to write"""
    longest = max(len(pair.asked) + len(pair.answer) for pair in pairs)
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for i, (asked, answer, given) in enumerate(pairs):
        tokens[i, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        taught = torch.ones(len(answer), dtype=torch.bool) if given is None else ~torch.tensor(given)
        mask[i, len(asked) : len(asked) + len(answer)] = taught
    return tokens, mask


@dataclass(frozen=True)
class Batches(Dataset):
    """The batches of a warm-up by step. A task's error is returned as a value, because a worker process could not raise
    it as one sentence.
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
        """The padded batches from step `first` on, in order. Worker processes make them ahead; they ignore signals,
        which this process handles.
        """
        workers = min(workers, os.cpu_count() or 1)
        forks = workers and "fork" in multiprocessing.get_all_start_methods()
        start = "fork" if forks else None  # with fork, tasks need not be picklable
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
