"""A loss scale for float16, whose smallest numbers are far larger than many gradients.

The loss is multiplied by a power of two before backward, and the fp32 gradients are divided by it before they are used,
so without an overflow the update has the bits of one without a scale. An overflow makes a gradient infinite or NaN; the
update is then skipped and the scale halved. After `INTERVAL` updates without an overflow the scale is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

START, LARGEST, INTERVAL = 2.0**16, 2.0**24, 200


@dataclass(frozen=True)
class LossScale:
    value: float = START
    updates: int = 0  # updates since it changed

    def after(self, finite: bool) -> LossScale:
        """The next scale, after an update whose gradients were finite or not; never below 1."""
        if not finite:
            return LossScale(max(1.0, self.value / 2))
        if self.updates + 1 < INTERVAL:
            return replace(self, updates=self.updates + 1)
        return LossScale(min(LARGEST, 2 * self.value))

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "updates": self.updates}

    @classmethod
    def from_state(cls, state: Mapping) -> LossScale:
        value, updates = float(state["value"]), int(state["updates"])
        if not (1 <= value <= LARGEST and math.frexp(value)[0] == 0.5 and 0 <= updates < INTERVAL):
            raise ValueError(f"the loss scale is {value} after {updates} updates")
        return cls(value, updates)
