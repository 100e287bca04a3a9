"""Documents for the report's page with known values everywhere, so that testing the page needs no run."""

from __future__ import annotations

import base64
import math
import zlib

import numpy as np

NEVER = 65535
MAIN = (
    "reward/mean", "eval/dense/accuracy", "eval/sparse/accuracy", "reject/trajectories/frac",
    "gap/xi/p05", "gap/xi/p50", "gap/xi/p95", "gap/alpha/p05", "old/kl/mean", "update/kl/mean", "update/clip/frac",
    "old/entropy/mean", "rollout/length/mean", "cache/bytes/allocated", "cache/bytes_saved/frac",
    "rollout/tokens_per_s", "time/step", "time/rollout", "time/update",
    "student/c8/kl", "rollout/loops/frac", "gap/ess/frac",
)  # fmt: skip
TYPICAL = {
    "cache/bytes/allocated": 3e6, "cache/bytes_saved/frac": 0.6,
    "rollout/tokens_per_s": 4500.0, "rollout/length/mean": 40.0,
    "time/step": 1.5, "time/rollout": 0.8, "time/update": 0.5, "gap/xi/p05": 0.8, "gap/xi/p50": 1.0, "gap/xi/p95": 1.2,
}  # fmt: skip


def curve(steps: list[int], values: list[float | None], spread: float = 0.0) -> dict:
    """A curve of the document; with a spread, binned: extremes that far from the means."""
    plain = {"step": steps, "mean": values}
    if not spread:
        return plain
    return plain | {
        side: [None if v is None else round(v + sign * spread, 5) for v in values]
        for side, sign in (("low", -1), ("high", 1))
    }


def curves(points: int, seed: int, names=MAIN, spread: float = 0.0) -> dict:
    rng = np.random.default_rng(seed)
    steps = list(range(1, points + 1))
    noise = 1 + 0.08 * rng.standard_normal((len(names), points))
    rise = 0.5 + 0.4 * np.tanh(np.linspace(0, 2.5, points))
    found = {}
    for row, name in zip(noise, names):
        values = (row * TYPICAL.get(name, 1.0) * (rise if name not in TYPICAL else 1)).round(5).tolist()
        every = 10 if name.startswith("eval/") and points >= 30 else 1
        found[name] = curve(steps[every - 1 :: every], values[every - 1 :: every], spread)
    return found


def said(level: str, text: str, figure: str, value: float) -> dict:
    return {"level": level, "text": text, "figure": figure, "value": value}


def run(name: str, points: int = 60, seed: int = 0, **changes) -> dict:
    return {
        "name": name, "method": "sparse-rl", "command": f"sparse-rl train tiny-sums --run.seed {seed} --out {name}",
        "steps": points, "seconds": 1.5 * points, "notes": [],
        "clock": {"step": list(range(1, points + 1)), "seconds": [1.5 * s for s in range(1, points + 1)]},
        "curves": curves(points, seed), "recipe": {"run.seed": seed}, "trajectories": [],
        "verdict": [
            said("good", "Few trajectories are rejected.", "reject/trajectories/frac", 0.031),
            said("fail", "The overlap is below 0.86: raise rollout.budget.", "gap/alpha/p05", 0.71),
            said("warn", "Some completions end in a loop.", "rollout/loops/frac", 0.12),
        ],
        **changes,
    }  # fmt: skip


def document(*runs: dict, **changes) -> dict:
    return {"version": 1, "live": None, "runs": list(runs), "differences": [], "notes": [], **changes}


def packed(gone: np.ndarray) -> dict:
    """The map of a trajectory. gone: uint16 [layers, heads, tokens]"""
    layers, heads, tokens = gone.shape
    return {"layers": layers, "heads": heads, "tokens": tokens, "data": deflated(gone.astype("<u2"))}


def deflated(values: np.ndarray) -> str:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(values.tobytes()) + packer.flush()).decode()


def evictions(layers: int, heads: int, tokens: int, budget: int, seed: int = 0) -> np.ndarray:
    """When each token goes: the first never, the others later, in a random order. -> uint16 [layers, heads, tokens]"""
    rng = np.random.default_rng(seed)
    index = np.arange(tokens)
    kept = (budget * rng.lognormal(-0.5, 0.9, (layers, heads, tokens))).astype(int) + 4
    gone = index + kept
    gone[gone >= tokens] = NEVER
    gone[..., 0] = NEVER
    return gone.astype(np.uint16)


def seen(gone: np.ndarray, query: int) -> np.ndarray:
    """Which tokens each head sees from a query. -> bool [layers, heads, tokens]"""
    index = np.arange(gone.shape[-1])
    return (index <= query) & (query < gone)


def trajectory(
    tokens: int = 60,
    prompt: int = 8,
    seed: int = 0,
    gone: np.ndarray | None = None,
    beacons: tuple[int, ...] = (),
    **changes,
) -> dict:
    rng = np.random.default_rng(seed)
    words = [" the", " sum", " of", " 17", " and", " 25", " is", " 42", ",", "\n", " so", " we", " carry", " one", "."]
    pieces = [words[k] for k in rng.integers(0, len(words), tokens)]
    n = tokens - prompt
    sampler = (-rng.exponential(0.7, n)).round(5).tolist()
    old = [round(s + g, 5) for s, g in zip(sampler, (0.3 * rng.standard_t(2, n)).tolist())]
    old = [min(-1e-5, x) for x in old]
    for b in beacons:
        pieces[b] = "\u25c6"
        sampler[b - prompt] = old[b - prompt] = None
    weight = [None if s is None else round(min(2.0, math.exp(o - s)), 5) for s, o in zip(sampler, old)]
    return {
        "step": 10, "prompt_index": 0, "sample_index": 0, "reward": 0.0, "verdict": "wrong", "accepted": True,
        "advantage": -0.35, "finish": "stop", "pieces": pieces, "num_prompt": prompt,
        "sampler": sampler, "old": old, "rank": rng.integers(0, 50, n).tolist(), "weight": weight,
        "clipped": rng.integers(0, 2, n).tolist(), "beacons": list(beacons),
        "map": None if gone is None else packed(gone), **changes,
    }  # fmt: skip
