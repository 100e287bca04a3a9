from ..cache.segments import Replay
from .given import Given, giving
from .register import Switch, through_backward, use_attention
from .slots import Feed
from .written_out import has_alibi

__all__ = ["Feed", "Given", "Replay", "Switch", "giving", "has_alibi", "through_backward", "use_attention"]
