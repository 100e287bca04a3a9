from ..cache.segments import Replay
from .register import through_backward, use_attention
from .slots import Feed

__all__ = ["Feed", "Replay", "through_backward", "use_attention"]
