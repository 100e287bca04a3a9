"""h2o: heavy hitters (arXiv 2306.14048). Half of the budget is the recent past, half what received most attention."""

from torch import Tensor

from .base import CacheView, ScoreCompressor, register


@register
class H2O(ScoreCompressor):
    name = "h2o"
    uses_values = False
    uses_mass = True

    def __init__(self, *, window: int | None = None, **options):
        super().__init__(**options)
        self.recent = window  # None: half of the budget

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, budget // 2 if self.recent is None else self.recent

    def score(self, view: CacheView) -> Tensor:
        assert view.mass is not None
        return view.mass
