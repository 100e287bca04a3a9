from .slots import CacheShape, SlotCache
from .trace import NEVER, Trace

__all__ = ["NEVER", "CacheShape", "SlotCache", "Trace"]
