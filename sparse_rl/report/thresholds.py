"""When a run is healthy: the thresholds of every rule in verdict.py."""

from __future__ import annotations

import math
from typing import Literal

Level = Literal["fail", "warn", "good"]
LEVELS: tuple[Level, ...] = ("fail", "warn", "good")  # the worst first

THRESHOLDS = {  # rule -> (warn, fail); if fail < warn, lower is worse. "Now" and "start" are defined in trend.py
    "reject": (0.30, 0.60),  # share of trajectories rejected now
    "rewarded": (1.5, math.inf),  # share rejected of rewarded / of unrewarded trajectories now, from FEW_REWARDED on
    "alpha": (0.86, 0.40),  # alpha p05 now; it says nothing if entropy is below BLIND
    "xi_low": (0.80, 0.50),  # 5th percentile of xi now
    "xi_high": (1.25, 2.0),  # 95th percentile of xi now
    "ess": (0.50, 0.20),  # effective sample size of the weights now, as a share of the tokens
    "loops": (0.02, 0.10),  # share of responses now that end by repeating themselves
    "truncated": (0.10, 0.50),  # share of responses now that were cut by length
    "collapse": (0.30, 0.10),  # entropy now / at the start, if it fell
    "explosion": (2.0, 4.0),  # entropy now / at the start, if it grew by NATS or more
    "clip": (0.05, 0.20),  # share of tokens clipped now
    "norm": (5.0, 50.0),  # gradient norm now / at the start
    "skipped": (0.0, 0.05),  # updates skipped because of non-finite numbers, per step
    "empty": (0.10, 0.50),  # updates with nothing to learn from, per step
    "flat": (0.50, 0.80),  # share of groups without variance now
    "reward": (2.0, -2.0),  # change of reward from start to now, in standard errors
    "gap": (0.05, math.inf),  # growth of (dense - sparse) held-out accuracy, for the dense cache; beyond chance
    "behind": (0.10, math.inf),  # dense - sparse held-out accuracy now, for the small cache; beyond chance
    "held_out": (0.03, 0.10),  # fall of held-out accuracy on the cache that the run is for; beyond chance
    "held_out_reward": (0.10, 0.30),  # fall of the held-out reward on that cache, as a share of it
    "memory": (0.20, 0.0),  # share of KV bytes saved against dense rows now
    "rollout": (0.80, 0.95),  # share of a step's time that rollouts take now
    "waits": (0.20, 0.60),  # share of a rollout's time in which every conversation waits for a reply now
    "ungraded": (0.0, 0.05),  # share of completions on which the grader failed
    "student": (1.0, 1.2),  # a student's KL now / at the start
}
BLIND = 0.02  # nats of entropy below which alpha p05 is near 1 whatever the cache does
FEW_REWARDED = 0.05  # a rejected share of rewarded trajectories below this is not worth a sentence
NATS = 0.5  # entropy must grow by this to explode


def level(rule: str, value: float) -> Level:
    warn, fail = THRESHOLDS[rule]
    if fail < warn:
        warn, fail, value = -warn, -fail, -value
    return "fail" if value > fail else "warn" if value > warn else "good"
