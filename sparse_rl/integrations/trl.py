"""Rollouts on a compressed cache inside TRL's GRPOTrainer: trl>=1.12,<2.

    trainer = GRPOTrainer(...)  # as in any script
    use_sparse_rollouts(trainer, compressor="rkv", budget=512, interval=128)
    trainer.train()

TRL believes that a vLLM engine samples for it, so it recomputes old log-probs and computes importance ratios and their
metrics. In fact our engine samples from the trainer's own model: nothing is copied. The trainer's class is extended by
three things: our corrections, replay, and metrics under `sparse_rl/`. Tools and environments: trl_turns.py.

Shapes: B completions, P + C tokens in TRL's rows (prompts padded on their left, completions on their right).
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import Trace
from ..compressors import Compressor, make
from ..errors import SparseRLError
from ..learn.batch import check_replay
from ..learn.correct import Corrected, Correction, correct, correction
from ..learn.diagnose import gap_metrics
from ..learn.learner import without_dropout
from ..learn.method import Method
from ..learn.score import hidden_states, logprobs_entropies_ranks, over_chunks, replay_of
from ..models import ends_of
from ..records import Trajectory, kv_tokens_saved
from ..rollout import Engine, Sampling
from ..streams import stream_key
from .trl_routes import records_routes, sampler_s_routes
from .trl_turns import OpenBatch

VERSIONS = "trl>=1.12,<2"
TRACES = "sparse_rl_traces"  # their key in TRL's batches: a list, which TRL shuffles and cuts like a tensor

_NEEDED = ["use_vllm", "_metrics", "_tokenizer", "state", "accelerator"]
_NEEDED += ["max_completion_length", "temperature", "top_p", "top_k"]
_NEEDED += ["vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"]
_NEEDED += ["_generate", "_generate_and_score_completions", "_compute_loss", "tools"]
_SCORES = ["model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy", "compute_aux_loss"]


def use_sparse_rollouts(
    trainer: Any,
    compressor: str | Compressor = "rkv",
    budget: int = 512,
    interval: int = 128,
    rows: int | None = None,
    correction: str | Correction | None = None,
    replay: bool = False,
    **compressor_options: Any,
) -> Any:
    """Let `trainer` (a GRPOTrainer) sample on a compressed cache, and return it.

    rows: completions that run at once; None: all that a process generates for one batch.
    correction: a preset or a `Correction`; "trl": TRL's own, as the GRPOConfig has it; None: sparse-rl, or none if
        `replay` is set.
    replay: compute all log-probs, also those of the loss and of the reference, from exactly what the sampler saw.
    compressor_options: options of the compressor, such as protect_prompt=True.
    """
    _check(trainer, replay)
    chosen = _choose_correction(trainer, correction, replay)
    if rows is None:
        rows = int(trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)
    with _own_forward(trainer.model):
        compressor = make(compressor, **compressor_options)
        routes = not compressor.folds and records_routes(trainer.model, replay)
        engine = Engine(trainer.model, compressor, budget, interval, rows, record_routes=routes)
    if compressor.folds:
        raise SparseRLError(
            f"{compressor.name} writes beacons among the tokens, which TRL cannot handle; use `sparse-rl train`."
        )
    sampler = Sampler(trainer, engine, chosen, replay)
    if dropped := without_dropout(trainer.model):
        warnings.warn(
            f"dropout of {max(dropped)} was set to 0: the sampler has none, and ratios must start at 1.", stacklevel=2
        )
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, sampler
    if chosen is not None:  # makes TRL recompute old log-probs, and describe the weights of tokens in its metrics
        trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = True, "token_truncate"
        trainer.vllm_importance_sampling_clip_max = chosen.cap or math.inf
        trainer.vllm_importance_sampling_clip_min = None
    trainer.__class__ = type(f"Sparse{type(trainer).__name__}", (SparseRollouts, type(trainer)), {})
    return trainer


class Sampler:
    """Takes the place of TRL's vLLM engine. `correction` None: TRL's own."""

    def __init__(self, trainer: Any, engine: Engine, correction: Correction | None, replay: bool):
        self.trainer, self.engine, self.correction, self.replay = trainer, engine, correction, replay
        self.calls: Counter[bool] = Counter()  # evaluates -> calls in this global step
        self.step = -1
        self.trajectories: list[Trajectory] = []  # of the last call
        self.open: OpenBatch | None = None  # conversations with tools that may go on
        ceiling = SimpleNamespace(max_model_len=getattr(trainer.model.config, "max_position_embeddings", sys.maxsize))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=ceiling))  # TRL looks for it there
        self.traces: list[Trace] | None = None  # the traces under which log-probs are computed now; None: dense
        self.sampling = Sampling(
            max_new_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_k=max(trainer.top_k or 0, 0),
            top_p=1.0 if trainer.top_p is None else trainer.top_p,
            stop_ids=ends_of(trainer.model, trainer._tokenizer).stops(both=True),  # TRL also ends at the tokenizer's
            for_correction=replay or correction is not None or trainer.vllm_importance_sampling_correction,
        )

    def sync_weights(self) -> None:
        """Copy nothing: the engine reads the trainer's own weights."""
        self.engine.version = self.trainer.state.global_step

    def generate(self, prompts: Sequence[list[int]], images=None, num_generations: int = 1, profiler=None) -> tuple:
        """TRL's call: one completion per prompt (TRL repeats prompts), as (prompts, completions, log-probs, None)."""
        if images is not None:
            raise SparseRLError("the prompts contain images, which sparse rollouts do not support; use text only.")
        if self.trainer.tools:
            return self.generate_turns(prompts)
        runs = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        with _own_forward(self.engine.model):
            self.trajectories = self.engine.generate(
                [prompt for prompt, _ in runs],
                sampling=self.sampling,
                seed=self.next_seed(),
                samples=[range(n) for _, n in runs],
            )
        if self.replay:
            self.traces = [t.trace for t in self.trajectories]
        responses = [(t.response_tokens, t.sampler_logprobs[t.num_prompt_tokens :]) for t in self.trajectories]
        return (
            prompts,
            [ids.tolist() for ids, _ in responses],
            [logprobs[:, None].tolist() for _, logprobs in responses],
            None,
        )

    def generate_turns(self, prompts: Sequence[list[int]]) -> tuple:
        """The same for conversations: TRL asks for first turns, then for those that follow a tool's output."""
        with _own_forward(self.engine.model):
            if self.open is None:
                self.open = OpenBatch(self.engine, prompts, self.sampling, self.next_seed())
                turns = self.open.first_turns()
            else:
                turns = self.open.next_turns(prompts)
        return prompts, [ids for ids, _ in turns], [[[x] for x in logprobs] for _, logprobs in turns], None

    def end_turns(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> None:
        """TRL has all turns of a batch."""
        assert self.open is not None
        self.trajectories, self.open = self.open.close(prompts, completions), None
        if self.replay:
            self.traces = [t.trace for t in self.trajectories]

    def abandon_turns(self) -> None:
        """Something failed in between."""
        if self.open is not None:
            self.open.abandon()
            self.open = None

    def next_seed(self) -> int:
        """A seed from the run's seed, step, call in the step and process: a resumed run draws the same samples."""
        trainer = self.trainer
        if self.step != trainer.state.global_step:
            self.step, self.calls = trainer.state.global_step, Counter()
        evaluates = not trainer.model.training
        call = self.calls[evaluates]
        self.calls[evaluates] += 1
        return rollout_seed(trainer.args.seed, self.step, call, trainer.accelerator.process_index, evaluates)

    def apply_correction(self, batch: dict) -> dict:
        """Write our mask and weights into TRL's batch, and log metrics."""
        mode = "train" if self.trainer.model.training else "eval"
        mask, sampled = batch["completion_mask"].bool(), batch["sampling_per_token_logps"]
        if "tool_mask" in batch:  # what tools wrote is not the policy's
            mask = mask & batch["tool_mask"].bool()
        metrics = {
            "kv_tokens_saved": kv_tokens_saved(self.trajectories),
            "kv_bytes_saved": self.engine.kv_bytes_saved(self.trajectories),
        }
        if (old := batch.get("old_per_token_logps")) is not None:
            gap = torch.where(mask, old - sampled, 0.0)
            if self.replay:
                mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.trainer.accelerator.mixed_precision)
                check_replay(gap.cpu(), mask.cpu(), mixed or self.trainer.model.dtype)
            corrected = self.correct(gap, mask, batch)
            on_cpu = Corrected(corrected.mask.cpu(), corrected.weights.cpu(), corrected.accepted.cpu())
            metrics |= gap_metrics(gap.cpu(), mask.cpu(), on_cpu)
            metrics["reject/trajectories/frac"] = 1 - corrected.accepted.float().mean().item()
            metrics["reject/tokens/frac"] = 1 - (corrected.mask.sum() / mask.sum().clamp(min=1)).item()
            if self.correction is not None:
                batch |= {
                    "tool_mask": corrected.mask.long(),
                    "importance_sampling_ratio": torch.where(corrected.mask, corrected.weights, 1.0),
                    "num_items_in_batch": self.trainer.accelerator.gather(corrected.mask.sum()).sum(),
                }
                if self.correction.old == "sampler":
                    batch["old_per_token_logps"] = sampled
        for name, value in metrics.items():
            self.trainer._metrics[mode][f"sparse_rl/{name}"].append(value)
        return batch | {TRACES: self.traces} if self.replay else batch

    def correct(self, gap: Tensor, mask: Tensor, batch: dict) -> Corrected:
        """The corrected batch. TRL's own correction masks tokens of weight 0, and rejects rows of only such tokens."""
        if self.correction is not None:
            gap = torch.zeros_like(gap) if self.correction.old == "sampler" else gap
            return correct(gap, mask, self.correction)
        weights = batch.get("importance_sampling_ratio", torch.ones_like(gap)).expand(mask.shape)
        kept = mask & (weights > 0)
        return Corrected(kept, weights, kept.any(1) | ~mask.any(1))


_Trainer: Any = object  # in its place is the class of the user's trainer


class SparseRollouts(_Trainer):
    """What is added to the class of the user's trainer."""

    def _generate(self, prompts):
        try:
            found = super()._generate(prompts)
            if self.tools:
                prompt_ids, completion_ids, *_ = found
                self.vllm_generation.end_turns(prompt_ids, completion_ids)
            return found
        finally:
            self.vllm_generation.abandon_turns()

    def _generate_and_score_completions(self, inputs):
        try:
            return self.vllm_generation.apply_correction(super()._generate_and_score_completions(inputs))
        finally:
            self.vllm_generation.traces = None

    def _compute_loss(self, model, inputs):
        self.vllm_generation.traces = inputs.get(TRACES)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.vllm_generation.traces = None

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        traces = self.vllm_generation.traces
        if traces is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options
            )
        whole, policy = (self.accelerator.unwrap_model(m) for m in (model, self.model))
        size = batch_size or len(input_ids)
        parts = zip(
            input_ids.split(size),
            attention_mask.split(size),
            [traces[i : i + size] for i in range(0, len(traces), size)],
        )
        with self.accelerator.autocast():
            values = [replayed(model, whole, policy, *part, logits_to_keep, self.temperature) for part in parts]
        logprobs, entropies = (torch.cat(several) for several in zip(*values))
        return logprobs, entropies, None


def replayed(
    model: nn.Module,
    whole: nn.Module,
    policy: nn.Module,
    ids: Tensor,
    attended: Tensor,
    traces: Sequence[Trace],
    keep: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, C] of the completions, each query seeing what its trace says. Differentiable.

    ids, attended [B, P + C]; `model` may be wrapped, `whole` is what it wraps, `policy` what samples. A row is padding,
    then the tokens as the sampler fed them: without that padding, its positions are those of its trace.
    """
    padding = (attended[:, :-keep] == 0).sum(1)  # [B]: before the prompt
    lengths = [trace.num_tokens for trace in traces]
    place = torch.arange(max(lengths), device=ids.device) + padding[:, None]  # [B, T]: a token's place in TRL's row
    inside = place.clamp(max=ids.shape[1] - 1)
    tokens = ids.gather(1, inside)
    targets = attended.gather(1, inside).bool() & (place == inside) & (place >= ids.shape[1] - keep)
    seen = replay_of(whole, [(row[:n].cpu(), trace) for row, n, trace in zip(tokens, lengths, traces)])
    states = hidden_states(model, tokens, seen, sampler_s_routes(policy, whole, traces))
    measure = logprobs_entropies_ranks(temperature)
    values = over_chunks(model, states, targets, measure, tokens[targets])  # [n, 3]
    where = attended[:, -keep:].bool()  # the same tokens, in the same order
    logprobs, entropies, _ = (
        values.new_zeros(where.shape).masked_scatter(where, column) for column in values.unbind(-1)
    )
    return logprobs, entropies


def rollout_seed(seed: int, step: int, call: int = 0, process: int = 0, evaluates: bool = False) -> int:
    """The engine's seed in the `call`-th generation of a global step."""
    return stream_key(seed, [step, call], process, int(evaluates))


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Give the model its class's forward: wrappers of TRL and accelerate (log-probs, autocast) slow sampling down."""
    from transformers import PreTrainedModel

    modules = [model, next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)]
    patched = [(m, vars(m).pop("forward")) for m in modules if "forward" in vars(m) and "_hf_hook" not in vars(m)]
    try:
        yield
    finally:
        for module, forward in patched:
            module.forward = forward


def _choose_correction(trainer: Any, given: str | Correction | None, replay: bool) -> Correction | None:
    """The correction; None: TRL's own."""
    if given == "trl":
        mode = trainer.vllm_importance_sampling_mode
        by_sequence = trainer.vllm_importance_sampling_correction and mode.startswith("sequence")
        if by_sequence and trainer.loss_type == "vespo":
            raise SparseRLError(
                f"vespo weighs tokens, not sequences ({mode}); set vllm_importance_sampling_mode='token_truncate'."
            )
        if by_sequence and not replay:
            warnings.warn(
                f"vllm_importance_sampling_mode={mode!r} multiplies the ratios of all tokens of a completion, so long "
                "compressed rollouts count for nothing or too much; set vllm_importance_sampling_mode='token_truncate' "
                "in the GRPOConfig, or use one of our corrections (correction='sparse-rl').",
                stacklevel=3,
            )
        return None
    chosen = given if isinstance(given, Correction) else correction(given or ("none" if replay else "sparse-rl"))
    Method(chosen, view="shadow" if replay else "dense")  # refuses a correction that cannot go with this view
    if chosen.clip_kl is not None and trainer.args.beta:
        raise SparseRLError(
            f"the correction clips the KL at {chosen.clip_kl}, which TRL's loss cannot; set beta=0 (it is "
            f"{trainer.args.beta}), or use the correction with clip_kl=None."
        )
    return chosen


def _check(trainer: Any, replay: bool) -> None:
    """Refuse, in one sentence, what cannot work."""
    from trl import __version__
    from trl.trainer.grpo_trainer import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise SparseRLError(f"{type(trainer).__name__} is not a GRPOTrainer; sparse rollouts support only that one.")
    if isinstance(trainer, SparseRollouts):
        raise SparseRLError("this trainer has sparse rollouts already; make a new one to change their settings.")
    score = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    known = [] if score is None else list(inspect.signature(score).parameters)
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if "kwargs" not in known:
        missing += [f"_get_per_token_logps_and_entropies({name})" for name in _SCORES if name not in known]
    if missing:
        raise SparseRLError(
            f"TRL {__version__} has no {missing[0]}: sparse rollouts support {VERSIONS}; install such a version."
        )
    args: Any = trainer.args
    batching, liger = args.use_transformers_continuous_batching, getattr(trainer, "use_liger_kernel", False)
    aux_loss = getattr(trainer, "aux_loss_enabled", False)
    refused = {
        "use_vllm brings another engine; set use_vllm=False": args.use_vllm,
        "continuous batching is another engine; set use_transformers_continuous_batching=False": batching,
        "a rollout_func samples by itself; omit it": trainer.rollout_func,
        "vision-language models are not supported; give a text model and its tokenizer": trainer._is_vlm,
        f"min_p={args.min_p} is not supported; leave it None": args.min_p,
        f"repetition_penalty={args.repetition_penalty} is not supported; set it to 1.0": args.repetition_penalty != 1.0,
        f"generation_kwargs={args.generation_kwargs} are not supported; leave them None": args.generation_kwargs,
        f"temperature={args.temperature} is not supported; set it above 0": not args.temperature > 0,
        "DeepSpeed shards or moves weights; sampling needs whole ones: launch with DDP": trainer.is_deepspeed_enabled,
        "FSDP shards weights; sampling needs whole ones: launch with DDP": trainer.is_fsdp_enabled,
        "this TRL's Liger loss supports neither corrections nor replay; set use_liger_kernel=False": liger,
        "replay has no load-balancing loss; set router_aux_loss_coef=0": replay and aux_loss,
    }
    for why in (why for why, holds in refused.items() if holds):
        raise SparseRLError(f"sparse rollouts: {why}.")
