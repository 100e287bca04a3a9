from ..cache.segments import Replay
from .register import use_attention, use_attention_through_backward
from .slots import Feed

__all__ = ["Feed", "Replay", "use_attention", "use_attention_through_backward"]
