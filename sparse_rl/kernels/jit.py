"""`triton.jit` without its types, which allow neither launch options such as num_warps nor numbers as constexpr."""

from typing import Any

import triton

jit: Any = triton.jit
