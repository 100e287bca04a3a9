"""What a forward pass hands to our attentions. A context variable carries it past the model, because many models drop
keyword arguments that they do not know, and some take no positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache.segments import Replay

if TYPE_CHECKING:
    from .slots import Feed


@dataclass(frozen=True)
class Given:
    positions: Tensor  # [B, T] of the tokens that the model reads
    feed: Feed | None = None  # for `slots`
    replay: Replay | None = None  # for `shadow`


_GIVEN: ContextVar[Given | None] = ContextVar("sparse_rl_given", default=None)


@contextmanager
def giving(given: Given) -> Iterator[None]:
    """Forward passes within it have `given`."""
    token = _GIVEN.set(given)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given() -> Given:
    found = _GIVEN.get()
    assert found is not None, "our attentions run within `giving`"
    return found
