"""tova: keep what the last query attends to (arXiv 2401.06104), averaged over the query heads of a KV head.

The original averages over all heads of a layer, so that a layer keeps one set of tokens, and evicts one token per step;
ours chooses for each KV head and evicts `interval` tokens at a time.
"""

from torch import Tensor

from .base import CacheView, ScoreCompressor, register


@register
class TOVA(ScoreCompressor):
    name = "tova"
    uses_values = False
    num_queries = 1

    def score(self, view: CacheView) -> Tensor:
        return view.attention_logits(last=1).softmax(-1).mean((2, 3))  # [B, H, G, 1, S] -> [B, H, S]
