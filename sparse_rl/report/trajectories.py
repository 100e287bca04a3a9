"""Sampled completions of a run as the page shows them: text, the numbers of every token, and when tokens were evicted.

    samples/step-000010/trajectories.jsonl, traces/     as sparse_rl.records writes them; lines of older runs lack keys

The newest steps come first, as many as there is space for. T tokens as fed, of which R belong to the response;
L layers, H KV heads.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.trace import Trace
from ..errors import SparseRLError
from ..files import find_checkpoints, lies_in
from .hindsight import read_hindsight
from .read import json_lines

BEACON = "\u25c6"
MOST = 64  # trajectories of a run that are shown
SPACE = 12_000_000  # bytes of their JSON


def read_samples(folder: Path, most: int = MOST, space: int = SPACE) -> tuple[list[dict[str, Any]], list[str]]:
    """Trajectories of the newest steps, and notes on what is omitted. Maps get the space that the texts leave, and
    regret the space that the maps leave.
    """
    notes: list[str] = []
    chosen, used = _newest(folder, most, space // 2, notes)
    for done, (title, samples, line, shown) in enumerate(chosen):
        found, why = read_map(samples, line)
        if why is not None:
            notes.append(f"{title} has no map: {why}")
        size = len(json.dumps(found))
        used += size
        if used > space:
            used -= size
            omitted = f"the maps of {len(chosen) - done} of {len(chosen)} trajectories are omitted"
            notes.append(f"{omitted}: all would take more than {space / 1e6:.1f} MB")
            break
        shown["map"] = found
    _add_regret([it for it in chosen if it[-1]["map"] is not None], space - used, notes)
    return [shown for *_, shown in chosen], notes


Chosen = tuple[str, Path, dict[str, Any], dict[str, Any]]  # title, folder, line of the file, what the page shows


def _add_regret(chosen: list[Chosen], space: int, notes: list[str]) -> None:
    """To the maps of trajectories, newest first, while it fits."""
    for done, (title, samples, line, shown) in enumerate(chosen):
        where = shown["map"]
        regret, why = read_hindsight(samples, line["trace"], (where["layers"], where["heads"], where["tokens"]))
        if why is not None:
            notes.append(f"{title} has no regret: {why}")
        if regret is None:
            continue
        space -= len(json.dumps(regret))
        if space < 0:
            omitted = f"the regret of {len(chosen) - done} of {len(chosen)} trajectories is omitted"
            notes.append(f"{omitted}: there is no space for it beside the maps")
            break
        shown["map"] = {**where, "regret": regret}


def _newest(folder: Path, most: int, space: int, notes: list[str]) -> tuple[list[Chosen], int]:
    """The newest trajectories that fit, without maps; and the bytes they take."""
    inside = lies_in(folder / "samples", folder)
    if not inside:
        notes.append("samples is a link out of the run's folder and is not read")
    steps = sorted(_steps(folder / "samples"), reverse=True) if inside else []
    text_of = Texts(folder / "checkpoints", notes)
    chosen: list[Chosen] = []
    used, omitted, seen, full = 0, 0, 0, ""  # full: why no more are shown
    for step, samples in steps:
        if full:
            break
        seen += 1
        for title, line in _lines(folder, samples, notes):
            if not full and len(chosen) == most:
                full = f"{most} are shown"
            if not full:
                shown = trajectory(step, line, text_of)
                size = len(json.dumps(shown))
                if used + size <= space:
                    chosen.append((title, samples, line, shown))
                    used += size
                    continue
                full = f"their text would take more than {space / 1e6:.1f} MB"
            omitted += 1
        full = full or (f"{most} are shown" if len(chosen) == most else "")
    gone = [f"{omitted} of step {steps[seen - 1][0]}"] if omitted else []
    gone += [f"those of {len(steps) - seen} older steps"] if len(steps) > seen else []
    if gone:
        notes.append(f"trajectories are omitted, {' and '.join(gone)}: {full}")
    return chosen, used


def _lines(folder: Path, samples: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, line) of the valid trajectories of one step."""
    file = f"samples/{samples.name}/trajectories.jsonl"
    if not lies_in(folder / file, folder):
        notes.append(f"{file} is a link out of the run's folder and is not read")
        return
    for number, line in json_lines(samples / "trajectories.jsonl", notes, file):
        title = f"line {number} of {file}"
        if (why := invalid(line)) is None:
            yield title, line
        else:
            notes.append(f"{title} is not a trajectory ({why}) and is omitted")


def _steps(samples: Path) -> list[tuple[int, Path]]:
    """(step, folder) of a run's samples. The folder may be missing, or be removed right now."""
    try:
        folders = list(samples.iterdir())
    except OSError:
        return []
    numbers = [(folder.name.removeprefix("step-"), folder) for folder in folders if folder.name.startswith("step-")]
    return [(int(number), folder) for number, folder in numbers if number.isascii() and number.isdigit()]


def invalid(line: dict) -> str | None:
    """Why a line is not a trajectory, or None. Keys that are not checked here may be missing."""
    tokens, prompt = line.get("tokens"), line.get("num_prompt_tokens")
    are_ids = isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**31 for token in tokens)
    if not tokens or not are_ids:
        return "tokens is not a list of token ids"
    if type(prompt) is not int or not 0 <= prompt <= len(tokens):
        return f"num_prompt_tokens is {str(prompt)[:20]}, but there are {len(tokens)} tokens"
    last, runs = prompt, line.get("given", [])
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        return "given is not a list of [begin, end]"
    for begin, end in runs:
        if not last <= begin < end <= len(tokens):
            return f"given holds {[begin, end]}, but there are {prompt} + {len(tokens) - prompt} tokens"
        last = end
    return None


def _is_run(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(place) is int for place in value)


def trajectory(step: int, line: dict, text_of: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
    """A line of trajectories.jsonl as the page has it, without its map; None for what the line lacks."""
    tokens, first = line["tokens"], line["num_prompt_tokens"]
    beacon = line.get("beacon_id")
    beacons = [i for i, token in enumerate(tokens) if type(beacon) is int and token == beacon]
    given = line.get("given", [])
    silent = {*beacons, *(i for begin, end in given for i in range(begin, end))}  # the policy did not sample them
    pieces = line.get("pieces")
    if not (
        isinstance(pieces, list) and len(pieces) == len(tokens) and all(isinstance(piece, str) for piece in pieces)
    ):
        pieces = text_of(tokens)
    pieces = [*pieces]
    for i in beacons:
        pieces[i] = BEACON

    def response(name: str, value_of: Callable[[Any], Any]) -> list | None:
        """[T] -> [R], with None for beacons and given tokens; None if the line lacks this key."""
        values = line.get(name)
        if not isinstance(values, list) or len(values) != len(tokens):
            return None
        every = [value_of(value) for value in values]
        for i in silent:
            every[i] = None
        return every[first:]

    nothing = [None] * (len(tokens) - first)
    return {
        "step": step,
        "prompt_index": _whole(line.get("prompt_index")),
        "sample_index": _whole(line.get("sample_index")),
        "reward": _number(line.get("reward")),
        "rewards": _named(line.get("rewards")),
        "verdict": _text(line.get("verdict")),
        "accepted": line["accepted"] if isinstance(line.get("accepted"), bool) else None,
        "advantage": _number(line.get("advantage")),
        "finish": _text(line.get("finish_reason")),
        "pieces": pieces,
        "num_prompt": first,
        "sampler": response("sampler_logprobs", _number) or nothing,
        "old": response("old_logprobs", _number) or nothing,
        "rank": response("rank", _whole),
        "weight": response("weight", _number),
        "clipped": response("clipped", lambda value: int(value) if value in (0, 1) else None),
        "beacons": beacons,
        "given": given,
        "map": None,
    }


def _number(value: Any) -> float | None:
    """To five decimals: gaps are differences of these numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return round(float(value), 5) + 0.0  # + 0.0 turns -0.0 into 0.0


def _named(value: Any) -> dict[str, float | None]:
    """The named rewards that a reward is made of; none if the line has none."""
    known = value.items() if isinstance(value, dict) else ()
    return {name[:40]: _number(number) for name, number in list(known)[:20]}


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**53 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def read_map(samples: Path, line: dict) -> tuple[dict[str, Any] | None, str | None]:
    """The map of a line's trace, or None and the reason."""
    name = line.get("trace")
    if not isinstance(name, str) or "\0" in name:
        return None, "the line names no trace"
    path = samples / name
    try:
        if not lies_in(path, samples):
            return None, f"its trace {name!r:.80} lies outside its folder"
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return None, f"its trace {name!r:.80} is not a file"
        shown = encoded(path, about.st_mtime_ns, about.st_size)
    except (SparseRLError, OSError, UnicodeError) as error:
        return None, f"{error!s:.200}".replace(f"{samples}/", "").rstrip(".")
    if shown["tokens"] != len(line["tokens"]):
        return None, f"its trace has {shown['tokens']} tokens, but there are {len(line['tokens'])}"
    if shown["data"] is None:
        return None, f"{shown['tokens']} tokens are too many for a map"
    return shown, None


@functools.lru_cache(maxsize=64 * MOST)  # a live page asks for the same maps every second
def encoded(path: Path, changed: int, size: int) -> dict[str, Any]:
    """A trace file as the page has it: raw deflate of little-endian uint16 [L, H, T]. A changed file is read again."""
    evicted_at = Trace.load(path).evicted_at.numpy()
    layers, heads, tokens = evicted_at.shape
    if evicted_at.dtype != np.uint16:
        return {"layers": layers, "heads": heads, "tokens": tokens, "data": None}
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    data = squeeze.compress(np.ascontiguousarray(evicted_at, dtype="<u2").tobytes()) + squeeze.flush()
    return {"layers": layers, "heads": heads, "tokens": tokens, "data": base64.b64encode(data).decode()}


class Texts:
    """The text of tokens whose run did not write it: from the newest checkpoint's tokenizer, or else their ids."""

    def __init__(self, checkpoints: Path, notes: list[str]):
        self.checkpoints, self.notes = checkpoints, notes
        self.known: dict[int, str] = {}

    @functools.cached_property
    def tokenizer(self) -> Any:
        found = find_checkpoints(self.checkpoints)
        if found and not lies_in(found[-1][1], self.checkpoints.parent):
            self.notes.append("checkpoints is a link out of the run's folder and is not read: token ids are shown")
            return None
        if not found:
            self.notes.append("there is no checkpoint whose tokenizer knows the text of tokens: token ids are shown")
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(found[-1][1], local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a damaged folder may fail in any way
            why = " ".join(str(error).split())[:200]
            self.notes.append(f"the tokenizer of {found[-1][1].name} cannot be loaded ({why}): token ids are shown")
            return None

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        for token in set(tokens) - self.known.keys():
            text = self.tokenizer.decode([token]) if self.tokenizer is not None else ""
            self.known[token] = text or f"\u27e8{token}\u27e9"
        return [self.known[token] for token in tokens]
