"""Sample completions and score them with the same weights, in the process that learns or on another machine
(remote.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config import Recipe
from ..errors import SparseRLError
from ..learn.batch import Sampled, Scored, minibatch_rows, score
from ..learn.critic import Critic
from ..learn.overlap import overlap
from ..learn.packing import packs
from ..learn.regret import Digest
from ..models import evaluating, stop_ids
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..streams import stream_key
from .budget import compressor_of
from .parts import replayed_routing
from .samples import positions_to_write, samples_due

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECK_STREAM = 0xC4EC4  # separates the choice of trajectories to check from other random numbers of a step


class Completer:
    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        critic: Critic | None = None,
        scores: bool = True,
    ):
        """`scores`: also score what is sampled, which may need the starting model as a reference."""
        self.recipe, self.model, self.tokenizer, self.critic = recipe, model, tokenizer, critic
        self.method, rollout = recipe.learn.resolve_method(), recipe.rollout
        self.reference = self._reference() if scores else None
        self.routing = replayed_routing(recipe, model)
        self.engine = Engine(
            model,
            compressor_of(rollout),
            rollout.max_budget,
            rollout.interval,
            rollout.rows,
            record_routes=self.routing is not None and self.method.view == "shadow",
        )
        if recipe.records_support and self.engine.compressor.chooses:
            raise SparseRLError(
                f"rollout.top_k is {rollout.top_k} and rollout.top_p {rollout.top_p}, but with {rollout.compressor} "
                "the policy chooses its folds and must be able to draw every token; set them to 0 and 1."
            )
        self.sampling = Sampling(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            stop_ids=self._stop_ids(),
            for_correction=True,
            support=recipe.records_support,
        )

    def score(self, sampled: Sampled, number: int, positions: list[int]) -> Scored:
        """Old log-probs, reference log-probs, entropies and ranks of the rows of some positions.

        If the update itself checks the trajectories of its first minibatch, only one of each minibatch is scored, plus
        those that are written to samples/. These are scored separately, because nothing may depend on what is written.
        """
        tokens, view = self.recipe.micro_batch_tokens, self.method.view
        packing = packs(self.model, self.recipe.learn.packing)
        reference_view = "dense" if self.recipe.has_dense_reference else None

        def rows(wanted: Iterable[int]) -> Tensor:
            return torch.tensor([row for row, p in enumerate(positions) if p in {*wanted}], dtype=torch.int64)

        only = None if self.recipe.scores_all else rows(self._drawn(number))
        reference, temperature = self.reference() if self.reference else None, self.sampling.temperature
        scored = score(
            self.model,
            sampled,
            tokens,
            temperature,
            reference,
            view,
            reference_view,
            packing,
            self.critic,
            only=only,
            routing=self.routing,
        )
        if only is None or not samples_due(self.recipe, number + 1):
            return scored
        shown = rows(positions_to_write(self._positions, self.recipe.run.samples))
        return scored.with_shown(
            score(
                self.model,
                sampled,
                tokens,
                temperature,
                view=view,
                packing=packing,
                only=shown,
                routing=self.routing,
            )
        )

    def _drawn(self, number: int) -> list[int]:
        """One position of every minibatch of a step."""
        recipe = self.recipe
        parts = minibatch_rows(self._positions, recipe.learn.minibatches, recipe.rows_together)
        return [
            int(part[stream_key(recipe.run.seed, [number, turn], CHECK_STREAM) % len(part)])
            for turn, part in enumerate(parts)
        ]

    @property
    def _positions(self) -> int:
        """The number of positions of a step, over all processes."""
        return self.recipe.rollout.prompts * self.recipe.rollout.group_size

    def diagnose(self, trajectory: Trajectory) -> tuple[Tensor, Tensor | None]:
        """By token, in fp64: the overlap of the dense and the sampler's distributions, and the regret of evictions."""
        digest = Digest(trajectory.trace) if self.engine.compressor.has_budget else None
        with evaluating(self.model):
            alpha = overlap(self.model, trajectory, self.sampling.temperature, digest).double().cpu()
        return alpha, None if digest is None else digest.summary()

    def _stop_ids(self) -> tuple[int, ...]:
        """The stop tokens: the model's own and those of the recipe."""
        ids: list[int] = []
        for name in self.recipe.rollout.stop:
            number = self.tokenizer.convert_tokens_to_ids(name)
            if not isinstance(number, int) or number == self.tokenizer.unk_token_id:
                raise SparseRLError(
                    f"rollout.stop names {name!r}, which is not a token of this tokenizer; name another."
                )
            ids.append(number)
        return tuple(dict.fromkeys([*ids, *stop_ids(self.model, self.tokenizer)]))

    def _reference(self) -> Callable[[], AbstractContextManager[nn.Module]] | None:
        """A context manager that gives the starting model; None if nothing is compared with it."""
        if not self.recipe.keeps_reference:
            return None
        if self.recipe.model.lora_rank:
            from peft import PeftModel

            adapted: nn.Module = self.model
            assert isinstance(adapted, PeftModel)

            @contextmanager
            def without_adapters() -> Iterator[nn.Module]:
                with adapted.disable_adapter():
                    yield adapted

            return without_adapters
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return lambda: nullcontext(frozen)
