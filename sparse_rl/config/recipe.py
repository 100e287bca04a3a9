"""The recipe, which defines a run: one frozen dataclass per section, with typed keys, their defaults and their help.

    model: {name: tiny-sums}
    task: {name: sums, count: 8}                    # keys beside `name` are the task's own options
    rollout: {compressor: rkv, budget: 38, interval: 4}
    learn: {method: sparse-rl}

A section checks its own values when it is made; `Recipe` checks what one section requires of another. parse.py reads
recipes from YAML and the command line, values.py converts their values.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.formats import PLAIN, slot_format
from ..errors import SparseRLError, check_count, require_int
from ..files import code_in
from ..keys import key
from ..learn.dpo import DPO
from ..learn.loss import Loss
from ..learn.objective import Objective
from ..learn.optimizer import OptimizerSettings
from ..learn.ppo import PPO, ActorCritic
from ..learn.student import StudentSettings
from ..learn.support import MOST
from .budget import Adaptive, check_layer_budgets
from .learn import LearnSettings
from .model import ModelSettings
from .pool import check_pool
from .sections import EvalSettings, RunSettings, ScorerSettings, WarmupSettings
from .task import TaskSettings
from .values import plain

RECIPES = Path(__file__).parent.parent / "recipes"  # the recipes in the package


@dataclass(frozen=True)
class RolloutSettings:
    compressor: str = key(
        "a name from `sparse-rl list compressors`, prompt-only:NAME, `file.py` or `file.py:Class`", "rkv"
    )
    budget: int | Adaptive = key(
        "slots that a row keeps at an eviction; {min: 32, max: 64, target: {alpha_5: 0.9}}: adjusted between steps",
        512,
    )
    layer_budgets: list[int] = key(
        "slots that each layer keeps, with rollout.budget as their mean; `sparse-rl allocate` proposes some; []: every "
        "layer keeps the budget",
        [],
    )
    interval: int = key("tokens between evictions; prompt-only ignores it", 128)
    compressor_options: dict = key("the compressor's own parameters, such as {sinks: 2, window: 8}", {})
    slots: str = key(
        "how slots store keys and values: model (in the model's dtype), fp8 or int8; the learner replays the rounding",
        PLAIN,
    )
    slots_kept: list[int] = key("with slots fp8 or int8, layers that stay in the model's dtype, such as [0, -1]", [])
    start_chunk: float = key(
        "with beacon:LEAST-MOST, the mean length of a chunk in tokens before the model has learned to choose it; 0: "
        "halfway between the two",
        0.0,
    )
    rows: int = key("sequences that each process decodes at a time", 64)
    ahead: int = key(
        "steps by which sampling is ahead of learning: 0; 1 (asynchronous; copies the weights); up to 8 with a pool", 0
    )
    pool: str | None = key(
        "ray: sample in separate processes on this machine; ray://HOST:PORT or ray://auto: in processes on the "
        "machines of a Ray cluster; null: in the processes that learn",
        None,
    )
    samplers: int = key("sampler processes in the pool; 0: one for every GPU (or CPU) of the cluster", 0)
    over_ask: float = key(
        "share of a step's work, its last part, that idle samplers of a pool may do a second time; the first result "
        "counts",
        0.0,
    )
    patience: float = key("seconds without progress after which a sampler of a pool is replaced", 600.0)
    prompts: int = key("prompts per step, over all processes", 128)
    group_size: int = key("completions per prompt", 8)
    max_new_tokens: int = key("tokens that a response may have; in a conversation, over all of its turns", 4096)
    max_turns: int = key("turns that the model may take in a conversation, for tasks that reply", 8)
    max_given_tokens: int = key("tokens that a task's reply may have; longer replies are cut", 512)
    temperature: float = key("the sampler's temperature, which every log-prob uses", 1.0)
    top_k: int = key(
        f"draw only from this many likeliest tokens, at most {MOST}; all log-probs are renormalised over them; 0: off",
        0,
    )
    top_p: float = key(
        f"draw only from the likeliest tokens that together have this probability, at most {MOST} of them; all "
        "log-probs are renormalised over them; 1: off",
        1.0,
    )
    stop: list[str] = key("tokens that end a response besides the model's own, such as <|im_end|>", [])

    def __post_init__(self):
        require_int(**{"rollout.budget": self.max_budget})
        counts = ("interval", "rows", "prompts", "group_size", "max_new_tokens", "max_turns", "max_given_tokens")
        require_int(**{f"rollout.{n}": getattr(self, n) for n in counts})
        check_count("completions of a step", self.prompts * self.group_size)
        slot_format(self.slots, self.slots_kept)
        check_layer_budgets(self.layer_budgets, self.budget)
        if lost := [name for name in ("slots", "slots_kept", "layer_budgets") if name in self.compressor_options]:
            raise SparseRLError(f"rollout.compressor_options sets {lost[0]}; write rollout.{lost[0]} instead.")
        check_pool(self.pool, self.ahead, self.samplers, self.over_ask, self.patience)
        if not (self.start_chunk == 0 or 2 < self.start_chunk < math.inf):
            given = self.start_chunk
            raise SparseRLError(f"rollout.start_chunk is {given}; it must be a number above 2, or 0 (halfway).")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise SparseRLError(
                f"rollout.temperature is {self.temperature}; training needs a positive number, such as 1.0."
            )
        require_int(at_least=0, at_most=MOST, **{"rollout.top_k": self.top_k})
        if not 0 < self.top_p <= 1:
            raise SparseRLError(f"rollout.top_p is {self.top_p}; it must be above 0 and at most 1 (off).")

    @property
    def truncates(self) -> bool:
        """Whether only some tokens can be drawn."""
        return bool(self.top_k) or self.top_p < 1

    @property
    def cache_options(self) -> dict:
        """The compressor's parameters, plus slot format and layer budgets if they are not the default."""
        more = {"layer_budgets": self.layer_budgets} if self.layer_budgets else {}
        if self.slots == PLAIN:
            return {**self.compressor_options, **more}
        kept = {"slots_kept": self.slots_kept} if self.slots_kept else {}
        return {**self.compressor_options, "slots": self.slots, **kept, **more}

    @property
    def max_budget(self) -> int:
        """The budget that rows are made for."""
        return self.budget.max if isinstance(self.budget, Adaptive) else self.budget


@dataclass(frozen=True)
class Recipe:
    model: ModelSettings
    task: TaskSettings
    rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    learn: LearnSettings = dataclasses.field(default_factory=LearnSettings)
    loss: Loss = dataclasses.field(default_factory=Loss)
    dpo: DPO = dataclasses.field(default_factory=DPO)
    ppo: PPO = dataclasses.field(default_factory=PPO)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    eval: EvalSettings = dataclasses.field(default_factory=EvalSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)
    student: StudentSettings = dataclasses.field(default_factory=StudentSettings)
    scorer: ScorerSettings = dataclasses.field(default_factory=ScorerSettings)
    warmup: WarmupSettings = dataclasses.field(default_factory=WarmupSettings)

    def __post_init__(self):
        """Check what one section requires of another."""
        self._check_groups()
        self._check_algorithm()
        self._check_rejection()
        self._check_beacons()
        self._check_students()
        self.scheduled_optimizer()
        self.scorer.check(self.rollout, self.model.shard, self.learn.algorithm)
        if self.rollout.ahead and (self.student.chunks or isinstance(self.rollout.budget, Adaptive)):
            why = "students learn from it" if self.student.chunks else "its budget follows what each step measures"
            raise SparseRLError(
                f"rollout.ahead is {self.rollout.ahead}, so sampling runs ahead of learning, but {why}; set it to 0."
            )
        if self.offloads_activations and self.model.shard:
            raise SparseRLError(
                "model.gradient_checkpointing is offload, which does not work with model.shard; use true, or set "
                "model.shard to false."
            )
        if self.optimizer.offload and self.model.shard:
            raise SparseRLError(
                "optimizer.offload and model.shard are both true, but only one of them can place the masters and "
                "moments; set one of them to false."
            )
        if self.loss.renormalise and self.loss.mean == "token-mean":
            raise SparseRLError(
                "loss.renormalise is true, but loss.mean is token-mean, which divides by accepted tokens already; "
                "set loss.renormalise to false."
            )

    def _check_groups(self) -> None:
        prompts, group_size = self.rollout.prompts, self.rollout.group_size
        trajectories = prompts * group_size
        if trajectories < self.learn.minibatches:
            raise SparseRLError(
                f"learn.minibatches is {self.learn.minibatches} but a step has {trajectories} trajectories "
                f"({prompts} prompts x {group_size}); use at most {trajectories}."
            )
        if group_size < 2 and self.learn.algorithm != "ppo":
            raise SparseRLError(
                "rollout.group_size is 1, but advantages compare completions of a prompt; use at least 2, or "
                "learn.algorithm: ppo, which compares with a critic instead."
            )
        if self.learn.dynamic and self.learn.algorithm == "ppo":
            raise SparseRLError(
                f"learn.dynamic is {self.learn.dynamic}, which replaces prompts whose completions all have the same "
                "reward, but ppo learns from those, too; set it to 0."
            )

    def _check_algorithm(self) -> None:
        if self.learn.algorithm == "ppo":
            self._check_ppo()
        if self.learn.algorithm != "online-dpo":
            return
        if self.loss.beta:
            raise SparseRLError(
                f"loss.beta is {self.loss.beta}, but online DPO stays close to its reference through dpo.beta (now "
                f"{self.dpo.beta}); set loss.beta to 0."
            )
        for name, usual in (("level", "token"), ("clip", "ratio")):
            if getattr(self.loss, name) != usual:
                raise SparseRLError(
                    f"loss.{name} is {getattr(self.loss, name)}, but online DPO has no ratio to clip; leave it at "
                    f"{usual}, or use learn.algorithm: grpo."
                )
        if self.rollout.prompts < self.learn.minibatches:
            raise SparseRLError(
                f"learn.minibatches is {self.learn.minibatches} but a step has {self.rollout.prompts} prompts, and "
                "online DPO keeps the completions of a prompt in one optimizer step; use at most "
                f"{self.rollout.prompts}."
            )

    def _check_ppo(self) -> None:
        if self.learn.advantage != "grpo" or self.learn.rebaseline:
            key = "learn.rebaseline is true" if self.learn.rebaseline else f"learn.advantage is {self.learn.advantage}"
            raise SparseRLError(
                f"{key}, but PPO's advantages come from its critic, not from the group; leave learn.advantage at grpo "
                "and learn.rebaseline at false."
            )
        if self.has_separate_critic and self.model.shard:
            raise SparseRLError(
                "model.shard divides the learner, but a separate critic would stay whole in every process; use "
                "ppo.critic: trunk, or set model.shard to false."
            )

    def _check_rejection(self) -> None:
        chosen = self.learn.resolve_method()
        if self.learn.refill and not chosen.correction.rejects:
            raise SparseRLError(
                f"learn.refill is {self.learn.refill} but {self.learn.method} rejects no trajectories; set it to 0."
            )
        if isinstance(self.rollout.budget, Adaptive):
            self.rollout.budget.check(self.learn.method, chosen.view, chosen.correction.rejects, self.run.diagnose)

    def _check_beacons(self) -> None:
        if not self.folds:
            return
        name, chosen = self.learn.method, self.learn.resolve_method()
        if chosen.view != "shadow":
            raise SparseRLError(
                f"rollouts with beacons need the shadow view, but {name} has the view {chosen.view}; "
                "use learn.method: shadow."
            )
        if chosen.distill is not None:
            raise SparseRLError(
                f"{name} distills between the dense and the shadow view, but rollouts with beacons have no dense view; "
                "use learn.method: shadow."
            )
        if self.has_dense_reference:
            raise SparseRLError(
                "dpo.reference is dense, but rollouts with beacons have no dense view; use dpo.reference: view."
            )

    def _check_students(self) -> None:
        if self.student.chunks and (self.folds or self.model.lora_rank):
            raise SparseRLError(
                "the teacher of students must be an ordinary model: set rollout.compressor to another one than "
                f"beacon, and model.lora_rank (now {self.model.lora_rank}) to 0 (student.lora_rank gives the students "
                "adapters)."
            )

    def scheduled_optimizer(self) -> OptimizerSettings:
        """The optimizer's settings, with the length of a schedule filled in."""
        given, steps = self.optimizer, self.run.steps * self.learn.minibatches
        if given.schedule == "constant" or given.decay_steps is not None:
            return given
        if steps <= given.warmup_steps:
            raise SparseRLError(
                f"optimizer.schedule is {given.schedule}, but the run has {steps} optimizer steps (run.steps "
                f"{self.run.steps} x learn.minibatches {self.learn.minibatches}) and the warm-up alone takes "
                f"{given.warmup_steps}; lower optimizer.warmup_steps, or set optimizer.decay_steps."
            )
        return dataclasses.replace(given, decay_steps=steps)

    @property
    def micro_batch_tokens(self) -> int:
        """`learn.micro_batch_tokens`, with the default for auto; a run has replaced auto by its choice
        (train/auto.py).
        """
        return self.learn.tokens

    @property
    def checkpoints_gradients(self) -> bool:
        """Whether activations are recomputed in backward, with the default for auto."""
        return self.model.gradient_checkpointing in (True, "offload", "selective")

    @property
    def keeps_products(self) -> bool:
        """Whether gradient checkpointing keeps the outputs of matrix products and attention."""
        return self.model.gradient_checkpointing == "selective"

    @property
    def offloads_activations(self) -> bool:
        """Whether gradient checkpointing keeps its activations in host memory."""
        return self.model.gradient_checkpointing == "offload"

    @property
    def scores_all(self) -> bool:
        """Whether every trajectory is scored before the update.

        In the shadow view the old log-probs are the sampler's, unless something depends on the rest of the gap, or the
        update cannot check them: because the learner's weights are newer than the sampler's (rollout.ahead), because
        students learn from the trajectories first, or because it does not see all of them (learn.dynamic). An algorithm
        may need more than log-probs. With top-k or top-p the pass also finds the supports, before any update changes
        the logits.
        """
        chosen, known = self.learn.resolve_method(), self.learn.algorithm in ("grpo", "online-dpo")
        later = self.rollout.ahead or self.student.chunks or self.learn.dynamic
        checked = chosen.view == "shadow" and known and not later
        # The clip range of a sequence's ratio is as small as rounding.
        depends = chosen.correction.looks_at_gap or self.loss.level == "sequence"
        return self.learn.rescore == "always" or not checked or depends or self.rollout.truncates

    @property
    def records_support(self) -> str | None:
        """What the sampler records about the tokens that top-k and top-p leave. The shadow view recovers them from
        margins; the dense view has other logits, so it needs ids.
        """
        if not self.rollout.truncates:
            return None
        return "margins" if self.learn.resolve_method().view == "shadow" else "ids"

    @property
    def rows_together(self) -> int:
        """How many neighbouring positions must stay in one optimizer step."""
        return self.rollout.group_size if self.learn.algorithm == "online-dpo" else 1

    @property
    def keeps_reference(self) -> bool:
        """Whether the log-probs of the starting model are needed."""
        return self.objective(self.loss).needs_reference

    @property
    def has_dense_reference(self) -> bool:
        """Whether the reference sees trajectories in the dense view, whatever the learner's is."""
        return self.learn.algorithm == "online-dpo" and self.dpo.reference == "dense"

    @property
    def distils(self) -> bool:
        return bool(self.student.chunks) or self.learn.resolve_method().distill is not None

    def objective(self, loss: Loss) -> Objective:
        """The learner's objective: `loss`, or the section of another algorithm."""
        return {"grpo": loss, "online-dpo": self.dpo, "ppo": ActorCritic(self.ppo, loss)}[self.learn.algorithm]

    @property
    def has_separate_critic(self) -> bool:
        """Whether a second model is kept to estimate values."""
        return self.learn.algorithm == "ppo" and self.ppo.critic == "separate"

    @property
    def folds(self) -> bool:
        """Whether rollouts fold chunks into beacons."""
        return self.rollout.compressor.partition(":")[0] == "beacon"

    def may_name_code(self) -> dict[str, str]:
        """The keys, with values, that may name a Python file or package that a run would execute, or a cluster."""
        return {
            "task.name": self.task.name,
            **{f"task.{key}": name for key, name in code_in(self.task.options).items()},
            **{f"eval.options.{key}": name for key, name in code_in(self.eval.options).items()},
            "rollout.compressor": self.rollout.compressor,
            "rollout.pool": self.rollout.pool or "",
            "learn.advantage": self.learn.advantage,
        }

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, as a YAML recipe holds them."""
        values = {name: {k: plain(v) for k, v in vars(section).items()} for name, section in vars(self).items()}
        values["task"] |= values["task"].pop("options")
        return values

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, type] = typing.get_type_hints(Recipe)
