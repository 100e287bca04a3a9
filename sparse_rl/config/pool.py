"""Check a recipe's settings for a pool of samplers in separate processes."""

from __future__ import annotations

import math
import re

from ..errors import SparseRLError, require_int, shown

MOST_AHEAD = 8  # steps by which a pool's samplers may be ahead of the learner
MOST_SAMPLERS = 4096


def check_pool(pool: str | None, ahead: int, samplers: int, over_ask: float, patience: float) -> None:
    most = MOST_AHEAD if pool else 1
    if isinstance(ahead, bool) or ahead not in range(most + 1):
        further = "" if pool else f" (to {MOST_AHEAD} with rollout.pool)"
        raise SparseRLError(
            f"rollout.ahead is {ahead!r}; it must be a whole number of steps from 0 to {most}{further}."
        )
    if pool is not None and not _is_pool(pool):
        raise SparseRLError(f"rollout.pool is {shown(pool)}; it must be ray, ray://HOST:PORT, ray://auto or null.")
    require_int(at_least=0, at_most=MOST_SAMPLERS, **{"rollout.samplers": samplers})
    if not 0 <= over_ask <= 1:
        raise SparseRLError(f"rollout.over_ask is {over_ask}; it must be a share from 0 to 1.")
    if not 0 < patience < math.inf:
        raise SparseRLError(f"rollout.patience is {patience}; it must be a number of seconds above 0.")
    given = {"samplers": samplers, "over_ask": over_ask}
    name = next((name for name, value in given.items() if value), None)
    if pool is None and name is not None:
        raise SparseRLError(
            f"rollout.{name} is {given[name]}, but there is no pool; set rollout.pool to ray, or leave it out."
        )


def _is_pool(pool: str) -> bool:
    """Whether this is the address of a pool. Others that Ray knows, such as ray://local, would listen
    to the network.
    """
    found = re.fullmatch(r"ray(://(auto|([\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})))?", pool)
    return found is not None and int(found[4] or 1) in range(1, 65536)
