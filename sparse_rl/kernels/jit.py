"""`triton.jit` without its types, which reject launch options such as num_warps and numbers as constexpr; also the
functions that kernels of several files share.
"""

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit


@jit
def product(x, y):
    """x * y in fp32, for a product that is rounded to a half precision and then added to something. From a plain
    product the compiler would make a fused multiply-add, which skips the rounding. Adding zero is exact.
    """
    return tl.fma(x, y, 0.0)
