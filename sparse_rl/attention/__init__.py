from .register import use_attention, use_attention_through_backward
from .shadow import Replay
from .slots import Feed

__all__ = ["Feed", "Replay", "use_attention", "use_attention_through_backward"]
