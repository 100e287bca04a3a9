"""The samplers of a run's pool as the page has them: who is where, and has done what, as of the last step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .lines import BEYOND, MAX_STEP, contents, json_object

POOL = "pool.json"
MOST = 200  # samplers and nodes that are shown
MAX_NAME = 80  # characters of a node's name


def read_samplers(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """None without a pool. What is not as a run writes it is left out, with a note."""
    try:
        data = json_object(contents(folder / POOL))
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"{POOL} cannot be read ({error.strerror or error})")
        return None
    samplers, lost = (data or {}).get("samplers"), (data or {}).get("lost")
    if data is None or not isinstance(samplers, list) or not isinstance(lost, dict):
        notes.append(f"{POOL} does not say which samplers there are, and is not shown")
        return None
    found = [sampler for sampler in map(_sampler, samplers) if sampler is not None]
    counts = {str(node)[:MAX_NAME]: count for node, count in lost.items() if _count(count) is not None}
    if len(found) < len(samplers) or len(counts) < len(lost):
        notes.append(f"{POOL} holds {len(samplers) - len(found) + len(lost) - len(counts)} entries that are left out")
    nodes = {sampler["node"] for sampler in found}
    return {
        "step": _count(data.get("step")),
        "samplers": [{**sampler, "lost": counts.get(sampler["node"], 0)} for sampler in found[:MOST]],
        "hidden": max(0, len(found) - MOST),
        "gone": [[node, count] for node, count in counts.items() if node not in nodes][:MOST],  # nodes without any
        "lost": sum(counts.values()),
    }


def _sampler(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("node"), str):
        return None
    numbers = {name: _count(value.get(name)) for name in ("sampler", "pieces", "tokens")}
    seconds, tokens = value.get("seconds"), numbers["tokens"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < BEYOND:
        return None
    if tokens is None or None in numbers.values():
        return None
    rate = tokens / seconds if seconds else None
    if rate is not None and not math.isfinite(rate):
        return None
    return {"node": value["node"][:MAX_NAME], **numbers, "tokens_per_s": rate}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_STEP else None


def sentence(found: dict[str, Any]) -> str:
    """For Markdown."""
    samplers = found["samplers"]
    nodes = {sampler["node"] for sampler in samplers}
    rate = sum(sampler["tokens_per_s"] or 0.0 for sampler in samplers)
    more = f" (the first {len(samplers)} of {len(samplers) + found['hidden']})" if found["hidden"] else ""
    return (
        f"samplers: {len(samplers)}{more} on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} when step "
        f"{found['step']} ended, {rate:,.0f} tokens/s while they work; {found['lost']} lost since the start"
    )
