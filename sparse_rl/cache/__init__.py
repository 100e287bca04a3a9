from .slots import CacheShape, LayerSlots, SlotCache
from .support import Support
from .trace import NEVER, Trace

__all__ = ["NEVER", "CacheShape", "LayerSlots", "SlotCache", "Support", "Trace"]
