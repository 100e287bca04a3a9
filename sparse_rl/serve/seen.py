"""What every head still sees of a conversation that runs."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

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
    evicted_at = live.engine.state.trace[row, :, :, :fed].cpu()  # [L, H, T]; uint16 as int16 bits, or int32
    unsigned = evicted_at.numpy().view(np.uint16) if evicted_at.element_size() == 2 else evicted_at.numpy()
    visible = (unsigned >= fed).reshape(-1, fed)
    return Seen(fed, len(visible), np.packbits(visible, axis=1).tobytes())
