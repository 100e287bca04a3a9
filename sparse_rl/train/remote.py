"""A pool's sampler, which runs in its own process: an engine and the weights that it is sent.

It gets a recipe, loads the starting model itself, and computes pieces of work: completions and, if it runs ahead of
the learner, their scores.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import sparse_rl

from ..config import Recipe
from ..errors import SparseRLError
from ..learn.batch import collate
from ..models import companions_of
from ..pool.pieces import Piece, completions, engine_call, piece_of
from ..pool.weights import Changes, Part, bytes_of
from ..pool.worker import Deliver, Fetch, Work
from ..records import Trajectory
from .ask import Done, closed
from .complete import Completer
from .log import Clock
from .parts import load_for_training, make_critic

PART = 512 * 2**20  # bytes of weights that travel together
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def weights_of(*modules: nn.Module | None) -> Iterator[dict[str, np.ndarray]]:
    """The trained weights of modules as integers of their width, which need no copy in a store; in parts, so that the
    host holds no second copy of a large model.
    """
    part, size = {}, 0
    for name, value in trained(*modules):
        part[name] = value.detach().cpu().contiguous().view(_AS_INTEGERS[value.element_size()]).numpy()
        size += part[name].nbytes
        if size >= PART:
            yield part
            part, size = {}, 0
    if part:
        yield part


@torch.no_grad()
def load_weights(parts: Iterable[Part], *modules: nn.Module | None) -> None:
    """Put the weights of `weights_of`, whole or as changes, into modules of the same kind. Those of a critic are left
    out where it is not.
    """
    values = dict(trained(*modules))
    missing = set(values)
    for part in parts:
        for name, content in part.items():
            if name not in values:
                continue
            missing.discard(name)
            value = values[name]
            if isinstance(content, Changes):
                places = torch.from_numpy(content.places.astype(np.int64)).to(value.device)
                value[torch.unravel_index(places, value.shape)] = _tensor(content.values, value.dtype).to(value.device)
            else:
                value.copy_(_tensor(content, value.dtype))
    assert not missing, f"weights that did not come: {sorted(missing)[:3]}"


def trained(*modules: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and what a compressor learns about a model beside them (models/companion.py)."""
    for i, module in enumerate(modules):
        if module is None:
            continue
        for name, value in module.named_parameters():
            if value.requires_grad:
                yield f"{i}.{name}", value
        if (companion := companions_of(module).get("learned")) is not None:
            yield from ((f"{i}.learned:{name}", value) for name, value in companion.tensors.items())


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """For reading: a store's arrays cannot be written to, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array).view(dtype)


@dataclass(frozen=True)
class MakeHands:
    """Makes a sampler's `Hands` in the process where it runs.

    threads: as many as the learner's, because rounding depends on their number; folder: where the learner was started,
    and so where the recipe's relative paths begin; code: the learner's version of this package
    """

    recipe: Recipe
    threads: int
    scores: bool
    folder: str = field(default_factory=os.getcwd)
    code: str = sparse_rl.__version__

    def __call__(self) -> RecipeHands:
        own = sparse_rl.__version__
        if self.code != own:  # another version may sample other tokens
            raise SparseRLError(
                f"sparse-rl is {own} on {socket.gethostname()} and {self.code} where the run learns; install the same "
                "version on all machines of the cluster."
            )
        if Path(self.folder).is_dir():  # a cluster's processes begin where the cluster was started
            os.chdir(self.folder)
        torch.set_num_threads(self.threads)
        model, tokenizer = load_for_training(self.recipe)
        critic = make_critic(self.recipe, model) if self.scores else None
        return RecipeHands(Completer(self.recipe, model, tokenizer, critic, self.scores), self.threads, self.scores)


class RecipeHands:
    def __init__(self, completer: Completer, threads: int, scores: bool):
        self.completer, self.threads, self.scores = completer, threads, scores
        self.rows = completer.recipe.rollout.rows
        self.version: int | None = None  # of the weights that are loaded
        self.moves = 0  # parts of weights that came, and pieces that were scored
        self.sampled = 0  # tokens
        self.fetched = 0  # bytes of weights
        self.clock = Clock()

    def complete(self, work: Work, fetch: Fetch, deliver: Deliver) -> None:
        torch.set_num_threads(self.threads)  # of this thread
        completer, engine = self.completer, self.completer.engine
        pieces = [piece for _, piece in work]
        first = pieces[0]
        if self.version != first.version:
            has, self.version = self.version, None  # until all of them are there
            with self.clock.stage("fetch"):
                load_weights(self._counted(fetch(has)), completer.model, completer.critic)
            self.version = engine.version = first.version
        if first.budget is not None and first.budget != engine.compressor.budget:
            engine.set_budget(first.budget)
        prompts, samples, indices = engine_call(pieces)
        number_of, found = piece_of(pieces), [[] for _ in pieces]
        delivered = list[Future[None]]()

        def send(number: int, done: Done) -> None:
            with self.clock.stage("pack"):
                payload = closed(done)
            deliver(work[number][0], payload)

        def note(trajectory: Trajectory) -> None:
            own = replace(trajectory, prompt_index=indices[trajectory.prompt_index])
            number = number_of[own.prompt_index, own.sample_index]
            self.sampled += len(own.response_tokens)
            found[number].append(own)
            if len(found[number]) == len(pieces[number].members) and not self.scores:
                delivered.append(packer.submit(send, number, Done(in_order(found[number]))))

        with ThreadPoolExecutor(1, "packer") as packer:  # while the next ones are sampled or scored
            with self.clock.stage("sample"):
                engine.generate(prompts, 1, completer.sampling, first.seed, on_finish=note, samples=samples, keep=False)
            for number, piece in enumerate(pieces if self.scores else ()):
                with self.clock.stage("score"):
                    done = self._score(piece, in_order(found[number]))
                delivered.append(packer.submit(send, number, done))
        for one in delivered:
            one.result()

    def _score(self, piece: Piece, trajectories: list[Trajectory]) -> Done:
        self.moves += 1
        places = list(completions(piece))
        scored = self.completer.score(collate(trajectories), 0, list(range(len(places))))
        diagnosed = {
            place: self.completer.diagnose(t)
            for place, t in zip(sorted(places), trajectories, strict=True)
            if place[1] in piece.diagnose
        }
        return Done(trajectories, scored, diagnosed)

    def _counted(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            self.moves += 1
            self.fetched += bytes_of(part)
            yield part

    def begin(self) -> None:
        self.completer.engine.stopped = False

    def stop(self) -> None:
        self.completer.engine.stopped = True

    def beats(self) -> int:
        return self.completer.engine.rounds + self.moves

    def tokens(self) -> int:
        return self.sampled

    def cache_bytes(self) -> int:
        storage = self.completer.engine.storage
        return sum(cache.nbytes for cache in (storage.cache, storage.scratch) if cache is not None)

    def fetched_bytes(self) -> int:
        return self.fetched

    def spent(self) -> Mapping[str, float]:
        return self.clock.seconds


def in_order(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: t.sample_index)


def store_bytes(versions: int, *modules: nn.Module | None) -> int:
    """Room for some versions of the weights, and as much again for what is under way."""
    return 2 * versions * sum(value.numel() * value.element_size() for _, value in trained(*modules))
