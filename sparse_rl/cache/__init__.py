from .formats import SlotFormat
from .slots import CacheShape, LayerSlots, SlotCache
from .states import LayerState, RowStates
from .support import Support
from .trace import NEVER, Trace

__all__ = [
    "NEVER",
    "CacheShape",
    "LayerSlots",
    "LayerState",
    "RowStates",
    "SlotCache",
    "SlotFormat",
    "Support",
    "Trace",
]
