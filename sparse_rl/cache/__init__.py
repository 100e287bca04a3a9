from .formats import SlotFormat
from .shape import CacheShape, LayerShape
from .slots import LayerSlots, SlotCache
from .states import LayerState, RowStates
from .support import Support
from .trace import NEVER, Trace

__all__ = [
    "NEVER",
    "CacheShape",
    "LayerShape",
    "LayerSlots",
    "LayerState",
    "RowStates",
    "SlotCache",
    "SlotFormat",
    "Support",
    "Trace",
]
