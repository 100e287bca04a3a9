"""`triton.jit` without its types, which allow neither launch options such as num_warps nor numbers as constexpr; and
what kernels of several files call.
"""

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit


@jit
def product(x, y):
    """x * y in fp32, for a product that is rounded to a half precision and then added to another. Of a plain one the
    compiler makes a fused multiply-add in the half precision, and so skips that rounding. Adding zero is exact.
    """
    return tl.fma(x, y, 0.0)
