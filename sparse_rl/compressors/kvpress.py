"""kvpress: the scorer NAME of the kvpress package, if it only needs keys and values.

kvpress wraps every registered attention function when it is imported. This is undone at once, because stock attention
must stay as it is. Presses that need hidden states, attention weights or a loaded model are refused, because a decoding
cache does not have them. A press that draws random numbers takes them from torch's global generator, so its choices
depend on the rows beside it (the trace still replays them exactly); the choices of our own `random` do not.
"""

from types import ModuleType

from torch import Tensor

from ..errors import SparseRLError, nearest
from .base import CacheView, ScoreCompressor, register


def import_kvpress() -> ModuleType:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    overrides = ALL_ATTENTION_FUNCTIONS._local_mapping  # where item assignment on the registry ends up
    before = dict(overrides)
    try:
        import kvpress
    except ImportError as error:
        raise SparseRLError(
            f"kvpress cannot be imported ({error}); install it without its pinned versions: "
            "`pip install --no-deps kvpress`, "
            "then `pip install requests cachetools datasets fire`."
        ) from error
    finally:
        overrides.clear()
        overrides.update(before)
    return kvpress


@register
class KVPress(ScoreCompressor):
    name = "kvpress"
    usage = "kvpress:NAME"

    def __init__(self, press: str, **options):
        super().__init__(**options)
        kvpress = import_kvpress()
        scorers = [
            name
            for name, item in vars(kvpress).items()
            if isinstance(item, type) and issubclass(item, kvpress.ScorerPress) and item is not kvpress.ScorerPress
        ]
        if press not in scorers:
            raise SparseRLError(f"kvpress has no scorer {press!r}; {nearest(press, scorers)}")
        self.name = f"kvpress:{press}"
        try:
            self.press = getattr(kvpress, press)()
        except TypeError as error:
            raise SparseRLError(
                f"{self.name} cannot be made from its name alone ({error}); use another scorer of kvpress."
            ) from error

    @classmethod
    def parse(cls, argument: str | None, /, **options) -> "KVPress":
        """The argument is the name of the press."""
        if not argument:
            raise SparseRLError("kvpress needs the name of a scorer; write kvpress:KnormPress, for example.")
        return cls.from_options(f"{cls.name}:{argument}", options | {"press": argument})

    def score(self, view: CacheView) -> Tensor:
        try:
            return self.press.score(None, None, view.keys, view.values, None, {})
        except (AttributeError, TypeError, KeyError, ValueError, AssertionError) as error:
            raise SparseRLError(
                f"{self.name} cannot score a decoding cache: it needs more than keys and values ({error}); "
                f"use one that does not, such as kvpress:KnormPress or kvpress:KeyDiffPress."
            ) from error
