"""Regret of a completion as the page has it, if `sparse-rl report --regret` has computed it.

L layers, H KV heads, T tokens, K tokens given back.
"""

from __future__ import annotations

import base64
import functools
import math
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.hindsight import Hindsight
from ..errors import SparseRLError
from ..files import lies_in

FINE = 100.0  # the scale of mass is linear below 1 / FINE and logarithmic above
MOST = 64  # tokens given back that the page lists
KEPT, HEADER = (
    1024,
    100_000,
)  # tokens given back, and bytes beside numbers, that a file may hold


def read_hindsight(samples: Path, trace: str, shape: tuple[int, int, int]) -> tuple[dict[str, Any] | None, str | None]:
    """The regret beside a trace, or None; and why a file that is there cannot be shown. shape: [L, H, T] of the map"""
    path = samples / "regret" / Path(trace).name
    try:
        if not os.path.lexists(path):
            return None, None
        if not lies_in(path, samples):
            return None, "its regret is a link out of its folder"
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return None, "its regret is not a file"
        if about.st_size > 4 * (math.prod(shape) + KEPT * (shape[2] + 1)) + HEADER:
            return None, f"its regret has {about.st_size:,} bytes, too many for a map of {list(shape)}"
        shown, found = encoded(path, about.st_mtime_ns, about.st_size)
    except (SparseRLError, OSError, UnicodeError) as error:
        return None, f"{error!s:.200}".replace(f"{samples}/", "").rstrip(".")
    if found != shape:
        return None, f"its regret is of {list(found)} layers, heads and tokens, but the map of {list(shape)}"
    return shown, None


@functools.lru_cache(maxsize=1024)  # a live page asks again every second
def encoded(path: Path, changed: int, size: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A file as the page has it, and its shape: raw deflate of mass as uint8 [L, H, T], on a scale that ends at `top`,
    and of changes as little-endian int16 [K, T], in thousandths of a nat. A changed file is read again.
    """
    found = Hindsight.load(path)
    mass = found.mass.double().numpy()
    top = float(mass.max(initial=0.0))
    level = np.log1p(FINE * mass) / np.log1p(FINE * top) if top > 0 else np.zeros_like(mass)
    shades = np.where(mass > 0, np.maximum(1, np.round(254 * level)), 0).astype(np.uint8)
    thousandths = np.clip(np.round(1000 * found.changes[:MOST].double().numpy()), -32767, 32767).astype("<i2")
    shown = {
        "step": found.step,
        "top": round(top, 6),
        "mass": _packed(shades),
        "tokens": found.tokens[:MOST].tolist(),
        "total": [round(float(total), 4) for total in mass.sum((0, 1))[found.tokens[:MOST].long().numpy()]],
        "changes": _packed(thousandths),
    }
    return shown, mass.shape


def _packed(values: np.ndarray) -> str:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(squeeze.compress(np.ascontiguousarray(values).tobytes()) + squeeze.flush()).decode()
