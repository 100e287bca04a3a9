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

DEFAULT_TOKENS = 16384  # tokens of a micro-batch


@dataclass(frozen=True)
class LearnSettings:
    algorithm: str = key("how rewards become a loss: a name from `sparse-rl list algorithms`", "grpo")
    method: str = key(
        "how the mismatch between sampler and learner is handled: corrected (naive, none, tis, mis, icepop, geo, "
        "sparse-rl, sparse-rl-released) or replayed (shadow, smd)",
        "sparse-rl",
    )
    view: str | None = key(
        "what the learner sees of a trajectory: dense (everything), or shadow (what the sampler's cache held); null: "
        "the method's choice",
        None,
    )
    distill: str | None = key(
        "with the shadow view, pull one view towards the other: dense-to-shadow, shadow-to-dense-forward or "
        "shadow-to-dense-reverse (forward or reverse KL); null: the method's choice (smd: dense-to-shadow)",
        None,
    )
    distill_weight: float | None = key(
        f"factor (lambda) of the distillation loss; null: the method's choice ({DISTILL_WEIGHT})", None
    )
    correction: dict = key(
        "parts of the method's correction to change, such as {cap: 3.0, mask_outside: [0.5, 2.0]}", {}
    )
    advantage: str = key(
        "advantage estimator: grpo, dr-grpo, rloo, or your own: `file.py` or `file.py:function`", "grpo"
    )
    advantage_eps: float = key("added to the group's standard deviation before dividing by it", 1e-6)
    rebaseline: bool = key("leave rejected trajectories out of the group's mean and standard deviation", False)
    refill: int = key("rounds of sampling replacements for rejected trajectories; 0: none", 0)
    dynamic: int = key(
        "rounds of sampling other prompts to replace those whose completions all have the same reward (DAPO's dynamic "
        "sampling); 0: none",
        0,
    )
    minibatches: int = key("optimizer steps per rollout", 4)
    rescore: str = key(
        "whether a separate forward pass computes the old log-probs: always; or auto, which skips it in the shadow "
        "view, where the sampler's log-probs are the same up to rounding and the update checks them (it is not skipped "
        "with ppo, rollout.ahead, rollout.top_k, rollout.top_p, students or learn.dynamic)",
        "auto",
    )
    micro_batch_tokens: int | str = key(
        "tokens in a forward-backward pass, padding included; auto: as many as the memory plan has room for, at most "
        "65536 (16384 without a GPU)",
        DEFAULT_TOKENS,
    )
    packing: str = key(
        "whether trajectories are fed as one row without padding, in which completions of a prompt share their common "
        "beginning: `auto` (on a GPU, if the architecture allows it), `always` or `never`",
        "auto",
    )
    replay_routing: bool | str = key(
        "for a mixture of experts: send each token to the experts that the sampler chose (in the dense view: that the "
        "pass for the old log-probs chose) instead of choosing again; auto: if the model's routers allow it",
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
                f"learn.refill is {self.refill} and learn.dynamic is {self.dynamic}, but the first samples a prompt "
                "again and the second replaces it; set one of them to 0."
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
        # a user's file is only loaded by a run
        if self.advantage not in ESTIMATORS and not names_python_file(self.advantage):
            raise SparseRLError(f"learn.advantage is {self.advantage!r}; {nearest(self.advantage, ESTIMATORS)}")
        if self.distill_weight is not None and not 0 < self.distill_weight < math.inf:
            raise SparseRLError(
                f"learn.distill_weight is {self.distill_weight}; it must be above 0 (to distill nothing, use "
                "learn.method: shadow)."
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
