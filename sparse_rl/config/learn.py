"""The section `learn` of a recipe: the algorithm, the method, and how the learner goes through a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import SparseRLError, nearest, require_int
from ..files import names_python_file
from ..keys import key
from ..learn.advantage import ESTIMATORS
from ..learn.correct import Correction, changed, only_rejection
from ..learn.distill import DISTILL_WEIGHT
from ..learn.method import Method, method
from ..learn.objective import ALGORITHMS, RELATIVES, settings_of
from ..learn.packing import PACKING
from .values import convert, types_of

DEFAULT_TOKENS = 16384  # of a micro-batch


@dataclass(frozen=True)
class LearnSettings:
    algorithm: str = key("what is learned from rewards: a name from `sparse-rl list algorithms`", "grpo")
    method: str = key(
        "naive, none, tis, mis, icepop, geo, sparse-rl, sparse-rl-released: corrections; shadow, smd: replay",
        "sparse-rl",
    )
    view: str | None = key(
        "how the learner sees a trajectory: dense, or shadow (what the sampler's cache held); null: the method's", None
    )
    distill: str | None = key(
        "with the shadow view, pull one view to the other: dense-to-shadow, shadow-to-dense-forward or "
        "shadow-to-dense-reverse (forward or reverse KL); null: the method's (smd: dense-to-shadow)",
        None,
    )
    distill_weight: float | None = key(
        f"the factor (lambda) of the distillation loss; null: the method's ({DISTILL_WEIGHT})", None
    )
    correction: dict = key("parts of the preset to change, such as {cap: 3.0, mask_outside: [0.5, 2.0]}", {})
    advantage: str = key("grpo, dr-grpo, rloo, or your own: `file.py` or `file.py:function`", "grpo")
    advantage_eps: float = key("what is added to the group's standard deviation", 1e-6)
    rebaseline: bool = key("leave rejected trajectories out of the group's mean and standard deviation", False)
    refill: int = key("rounds of sampling replacements for rejected trajectories; 0: none", 0)
    dynamic: int = key(
        "rounds of sampling other prompts in place of those whose completions all have the same reward (DAPO's dynamic "
        "sampling); 0: none",
        0,
    )
    minibatches: int = key("optimizer steps per rollout", 4)
    rescore: str = key(
        "whether a pass of its own finds the old log-probs: always, or auto: not in the shadow view, where they are "
        "the sampler's up to rounding and the update checks them, except with ppo, rollout.ahead, rollout.top_k, "
        "rollout.top_p, students or learn.dynamic",
        "auto",
    )
    micro_batch_tokens: int | str = key(
        "tokens of a forward-backward pass, padding included; auto: as many as the memory plan has room for, at most "
        "65536 (without a GPU 16384)",
        DEFAULT_TOKENS,
    )
    packing: str = key(
        "feed trajectories as one row without padding, and what the completions of a prompt begin with only once: "
        "`auto` (on a GPU, where the architecture is known), `always` or `never`",
        "auto",
    )
    replay_routing: bool | str = key(
        "of a mixture of experts: send each token to the experts that the sampler chose (in the dense view: those of "
        "the old log-probs' pass) instead of choosing anew; auto: where its routers let it",
        "auto",
    )

    def __post_init__(self):
        require_int(**{"learn.minibatches": self.minibatches})
        if isinstance(self.micro_batch_tokens, str) and self.micro_batch_tokens != "auto":
            given = self.micro_batch_tokens
            raise SparseRLError(f"learn.micro_batch_tokens is {given!r}; it must be a whole number or auto.")
        require_int(**{"learn.micro_batch_tokens": self.tokens})
        require_int(at_least=0, **{"learn.refill": self.refill, "learn.dynamic": self.dynamic})
        if self.refill and self.dynamic:
            raise SparseRLError(
                f"learn.refill is {self.refill} and learn.dynamic is {self.dynamic}: one samples a prompt again, the "
                "other replaces it; set one of them to 0."
            )
        if self.rescore not in ("auto", "always"):
            raise SparseRLError(f"learn.rescore is {self.rescore!r}; it must be auto or always.")
        if not self.advantage_eps >= 0:
            raise SparseRLError(f"learn.advantage_eps is {self.advantage_eps}; it must not be negative.")
        if self.algorithm in RELATIVES:
            raise SparseRLError(
                f"learn.algorithm is {self.algorithm!r}, which is grpo with other settings; use "
                f"{settings_of(self.algorithm)}."
            )
        if self.algorithm not in ALGORITHMS:
            raise SparseRLError(f"learn.algorithm is {self.algorithm!r}; {nearest(self.algorithm, ALGORITHMS)}")
        if self.replay_routing not in (True, False, "auto"):
            given = self.replay_routing
            raise SparseRLError(f"learn.replay_routing is {given!r}; it must be true, false or auto.")
        if self.packing not in PACKING:
            raise SparseRLError(f"learn.packing is {self.packing!r}; {nearest(self.packing, PACKING)}")
        if self.advantage not in ESTIMATORS and not names_python_file(self.advantage):  # which runs only in a run
            raise SparseRLError(f"learn.advantage is {self.advantage!r}; {nearest(self.advantage, ESTIMATORS)}")
        if self.distill_weight is not None and not 0 < self.distill_weight < math.inf:
            raise SparseRLError(
                f"learn.distill_weight is {self.distill_weight}; it must be above 0 (learn.method: shadow has none)."
            )
        if self.distill_weight is not None and self.resolve_method().distill is None:
            raise SparseRLError(
                f"learn.distill_weight is {self.distill_weight}, but {self.method} does not distill; use smd, or "
                "learn.distill."
            )
        self.resolve_method()

    @property
    def tokens(self) -> int:
        """`micro_batch_tokens`, with the default for auto."""
        return DEFAULT_TOKENS if isinstance(self.micro_batch_tokens, str) else self.micro_batch_tokens

    def resolve_method(self) -> Method:
        """The method with the parts that the recipe changes."""
        parts = {
            str(n): convert(v, types_of(Correction).get(n, Any), f"learn.correction.{n}")
            for n, v in self.correction.items()
        }
        names = ("view", "distill", "distill_weight")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        correction = changed(method(self.method).correction, **parts)
        if self.algorithm == "online-dpo":
            correction = only_rejection(correction, self.method)
        return method(self.method, correction=correction, **chosen)
