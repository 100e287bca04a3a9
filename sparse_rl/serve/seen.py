"""Find out what every head still sees of a running conversation."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..records import Trajectory
from ..rollout.conversation import Conversation
from ..rollout.live import LiveEngine


@dataclass(frozen=True)
class Seen:
    """bool [L, H, T] in bits, rows of T bits padded to whole bytes."""

    tokens: int  # T: all that were fed so far
    heads: int  # L x H
    bits: bytes

    @property
    def json(self) -> dict:
        return {"tokens": self.tokens, "heads": self.heads, "bits": base64.b64encode(self.bits).decode()}


def seen_by(live: LiveEngine, conversation: Conversation) -> Seen | None:
    """None: it has no row, or rows of its compressor keep no trace."""
    row, sequence = conversation.row, conversation.sequence
    if row is None or sequence is None or live.engine.compressor.folds:
        return None
    fed = sequence.fed
    return _seen(live.engine.state.trace[row, :, :, :fed].cpu(), fed)


def seen_at_end(trajectory: Trajectory) -> Seen:
    """The same of an answer that has ended; its last token was not fed."""
    fed = len(trajectory.tokens) - 1
    return _seen(trajectory.trace.evicted_at[..., :fed], fed)


def _seen(evicted_at: Tensor, fed: int) -> Seen:
    """[L, H, T]; uint16, also as int16 bits, or int32"""
    found = evicted_at.contiguous().numpy()
    visible = ((found.view(np.uint16) if found.itemsize == 2 else found) >= fed).reshape(-1, fed)
    return Seen(fed, len(visible), np.packbits(visible, axis=1).tobytes())
