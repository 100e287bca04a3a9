from .slots import CacheShape, LayerSlots, SlotCache
from .trace import NEVER, Trace

__all__ = ["NEVER", "CacheShape", "LayerSlots", "SlotCache", "Trace"]
