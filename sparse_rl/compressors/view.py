"""The view of a full row that a compressor gets to choose slots.

Shapes: B rows (each layer of a row counts as a row here), H KV heads, G query heads per KV head, S slots in use,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels import twins


@dataclass(frozen=True)
class CacheView:
    """The slots of full rows, as a compressor sees them. Slot S - 1 is the token fed last."""

    keys: Tensor  # [B, H, S, D] after RoPE
    values: Tensor | None  # [B, H, S, Dv]; None if the compressor said that it does not look at them
    feed: Tensor  # [B, H, S] feed index of each slot, ascending
    queries: Tensor | None  # [B, H * G, W, D] the last queries, oldest first; W <= what the compressor asked for
    mass: Tensor | None  # [B, H, S] attention received so far, summed over queries and over the group's heads
    streams: Tensor  # [B, H] int64: random streams, see sparse_rl.streams
    num_prompt_tokens: Tensor  # [B] tokens of the prompt
    scaling: float  # what the model multiplies q . k with
    softcap: float | None = None  # what the model bounds its logits with, if it does
    unreachable: Tensor | None = None  # [B, H, S] bool: beyond the layer's own sliding window for every later query
    layer: Tensor | None = None  # [B] int64: which layer's slots a row holds
    # [B, H, S] int64: how many replies ago a slot's token was given in a conversation (0: the last reply), -1: it is of
    # the prompt or was sampled; None: nothing was given, or the compressor did not say that it looks (`uses_given`)
    given_age: Tensor | None = None

    @property
    def is_prompt(self) -> Tensor:
        """Which slots hold tokens of the prompt. bool [B, H, S]"""
        return self.feed < self.num_prompt_tokens[:, None, None]

    def last_queries(self, count: int) -> Tensor:
        """The last (at most) `count` queries. -> [B, H * G, W', D]"""
        assert self.queries is not None, "a compressor that reads queries says how many with num_queries"
        return self.queries[:, :, -count:]

    def attention_logits(self, last: int) -> Tensor:
        """fp32 logits of the last (at most) `last` queries over all slots. -> [B, H, G, W', S]"""
        return self.logits_of(self.last_queries(last))

    def logits_of(self, queries: Tensor) -> Tensor:
        """fp32 logits of queries [B, H * G, W, D] over all slots. -> [B, H, G, W, S]"""
        return twins.grouped_logits(queries, self.keys, self.scaling, self.softcap, self.unreachable)
