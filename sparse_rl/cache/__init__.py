from .formats import SlotFormat
from .shape import CacheShape
from .slots import LayerSlots, SlotCache
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
