"""The record of one sampled completion (`Trajectory`), and how trajectories are written to disk and read back.

Shapes: T tokens of a trajectory (prompt + response), L layers, H KV heads. All tensors live on the CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .cache import Support, Trace
from .errors import SparseRLError
from .files import writing


@dataclass(frozen=True)
class Trajectory:
    """One completion with the evidence of how it was sampled."""

    tokens: Tensor  # int64 [T]: prompt, then response (its stop token included)
    num_prompt_tokens: int
    sampler_logprobs: Tensor  # fp32 [T]: under the distribution that was sampled from; 0 on the prompt
    trace: Trace  # what every query could see; evicted_at [L, H, T]
    finish_reason: str  # "stop": a stop token was sampled; "length": max_new_tokens were sampled
    prompt_index: int  # which prompt of the call
    sample_index: int  # which member of its group
    version: int = 0  # optimizer steps that had led to the weights that sampled it
    beacon_id: int | None = None  # stands in `tokens` where a beacon was fed; its log-prob is 0, unless it was chosen
    positions: Tensor | None = None  # int64 [T]: RoPE positions, if they differ from the feed indices
    # bool [T]: where the policy chose to fold (at the beacon) or to go on (at the token fed next), and this choice is
    # part of the log-prob; None: it does not choose its folds
    choices: Tensor | None = None
    support: Support | None = None  # which tokens could be drawn, where top-k or top-p left some out and a learner asks

    @property
    def prompt_tokens(self) -> Tensor:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def response_tokens(self) -> Tensor:
        """The sampled tokens; beacons are not sampled."""
        return self.tokens[self.response_mask]

    @property
    def response_mask(self) -> Tensor:
        """bool [T]: the sampled tokens."""
        response = torch.arange(len(self.tokens)) >= self.num_prompt_tokens
        return response if self.beacon_id is None else response & (self.tokens != self.beacon_id)

    @property
    def action_mask(self) -> Tensor:
        """bool [T]: everything that the policy chose, and that has a log-prob: tokens, and the folds of its choice."""
        return self.response_mask if self.choices is None else self.response_mask | self.choices


def kv_tokens_saved(trajectories: Sequence[Trajectory]) -> float:
    """1 - slots in use at the end / tokens, over all trajectories; the Sparse-RL paper counts this way."""
    slots = sum(t.trace.slots_in_use().double().mean().item() for t in trajectories)
    return 1 - slots / sum(t.num_prompt_tokens + len(t.response_tokens) for t in trajectories)


def entries(trajectory: Trajectory) -> Tensor:
    """Cache entries that each query of the response saw, its own included: the mean over layers and KV heads. fp64 [Q]

    The Q queries are the tokens fed after the prompt, beacons included; the last token is never fed. If nothing was fed
    after the prompt, the result is the number of prompt tokens.
    """
    first, last = trajectory.num_prompt_tokens, len(trajectory.tokens) - 1  # feed indices of queries: first .. last - 1
    if last <= first:
        return torch.tensor([first], dtype=torch.float64)
    evicted_at = trajectory.trace.evicted_at.long()[..., :last]  # [L, H, T - 1]
    moments = (evicted_at.clamp(first, last) - first).flatten()
    newly_evicted = moments.bincount(minlength=last - first + 1)[:-1]  # [Q], summed over layers and KV heads
    return torch.arange(first + 1, last + 1) - newly_evicted.cumsum(0).double() / evicted_at[..., 0].numel()


def mean_entries(trajectory: Trajectory) -> float:
    """The mean of `entries` over the queries."""
    return entries(trajectory).mean().item()


class TrajectoryWriter:
    """Writes trajectories as they finish: one readable JSON line each, with the trace in a file beside it.

    A line is written after its trace and names it, so every line is complete, and an interrupt loses nothing finished.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.lines = self.folder / "trajectories.jsonl"
        if self.lines.exists():
            raise SparseRLError(f"{self.lines} exists already; choose another folder or remove it first.")
        if self.folder.exists() and not self.folder.is_dir():
            raise SparseRLError(f"{self.folder} is a file; trajectories need a folder.")
        self._file = None  # opened with the first trajectory, so that a refused call leaves no files behind

    def write(self, trajectory: Trajectory, prompt: str | None = None, text: str | None = None, **more) -> None:
        """`prompt`, `text` and `more` are for human readers; the record is complete without them."""
        if self._file is None:
            with writing(self.lines):
                (self.folder / "traces").mkdir(parents=True, exist_ok=True)
                self._file = self.lines.open("a", encoding="utf-8")
        trace = f"traces/{trajectory.prompt_index:06d}-{trajectory.sample_index:03d}.safetensors"
        trajectory.trace.save(self.folder / trace)
        beacons = {}
        if trajectory.beacon_id is not None:
            assert trajectory.positions is not None
            beacons = {"beacon_id": trajectory.beacon_id, "positions": trajectory.positions.tolist()}
        if trajectory.choices is not None:
            beacons["choices"] = trajectory.choices.nonzero()[:, 0].tolist()
        supports = {}
        if trajectory.support is not None:
            name = Path("supports", Path(trace).name)
            with writing(self.folder):
                (self.folder / name.parent).mkdir(exist_ok=True)
            trajectory.support.save(self.folder / name)
            supports = {"support": name.as_posix()}
        line = {
            "prompt_index": trajectory.prompt_index,
            "sample_index": trajectory.sample_index,
            "finish_reason": trajectory.finish_reason,
            "version": trajectory.version,
            "prompt": prompt,
            "text": text,
            **more,
            "num_prompt_tokens": trajectory.num_prompt_tokens,
            "tokens": trajectory.tokens.tolist(),
            "sampler_logprobs": trajectory.sampler_logprobs.tolist(),
            "trace": trace,
            **beacons,
            **supports,
        }
        with writing(self.lines):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with writing(self.lines):
                self._file.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


# ValueError includes SparseRLError and the errors of JSON and UTF-8
_INVALID = (ValueError, KeyError, TypeError, RecursionError, OSError)


def read_trajectories(folder: str | os.PathLike) -> Iterator[Trajectory]:
    """The trajectories that a `TrajectoryWriter` wrote, in the order they finished; omits a line cut off by a crash."""
    path = Path(folder) / "trajectories.jsonl"
    if not path.is_file():
        raise SparseRLError(f"there is no {path}; give a folder that `sparse-rl rollout` or a run's samples/ wrote.")
    with path.open("rb") as lines:
        for number, text in enumerate((text for text in lines if text.endswith(b"\n")), 1):
            try:
                trajectory = _trajectory(json.loads(text), Path(folder))
            except _INVALID as error:
                why = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
                raise SparseRLError(f"{path}, line {number} is not a trajectory ({why}).") from error
            yield trajectory


def _trajectory(line: dict, folder: Path) -> Trajectory:
    if not isinstance(line, dict):
        raise SparseRLError(f"it holds {type(line).__name__}, not keys")
    why = _why_invalid(line)
    if why is not None:
        raise SparseRLError(why)
    beacons = {}
    if "beacon_id" in line:
        beacons = {"beacon_id": line["beacon_id"], "positions": torch.tensor(line["positions"])}
    if "choices" in line:
        where = torch.tensor(line["choices"], dtype=torch.int64)
        beacons["choices"] = torch.zeros(len(line["tokens"]), dtype=torch.bool).index_fill(0, where, True)
    trajectory = Trajectory(
        tokens=torch.tensor(line["tokens"], dtype=torch.int64),
        num_prompt_tokens=line["num_prompt_tokens"],
        sampler_logprobs=torch.tensor(line["sampler_logprobs"], dtype=torch.float32),
        trace=Trace.load(folder / line["trace"]),
        finish_reason=line["finish_reason"],
        prompt_index=line["prompt_index"],
        sample_index=line["sample_index"],
        version=line["version"],
        support=Support.load(folder / line["support"]) if "support" in line else None,
        **beacons,
    )
    lengths = {
        "tokens": len(trajectory.tokens),
        "log-probs": len(trajectory.sampler_logprobs),
        "trace": trajectory.trace.num_tokens,
    }
    if trajectory.support is not None:
        lengths["support"] = len(trajectory.support.counts)
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise SparseRLError(f"lengths differ: {found}; trace file {line['trace']}")
    return trajectory


def _why_invalid(line: dict) -> str | None:
    """Why the record is invalid, or None."""
    for name in ("num_prompt_tokens", "prompt_index", "sample_index", "version"):
        if not _is_count(line[name]):
            return f"{name} is {line[name]!r}, not a whole number from 0 on"
    for name, fits, what in (
        ("tokens", _is_count, "token ids"),
        ("sampler_logprobs", _is_logprob, "log-probs, up to 0"),
    ):
        if not isinstance(line[name], list) or not all(map(fits, line[name])):
            return f"{name} is not a list of {what}"
    if line["num_prompt_tokens"] > len(line["tokens"]):
        return f"num_prompt_tokens is {line['num_prompt_tokens']}, but there are {len(line['tokens'])} tokens"
    if line["finish_reason"] not in ("stop", "length"):
        return f"finish_reason is {line['finish_reason']!r}, not 'stop' or 'length'"
    if any(line["sampler_logprobs"][: line["num_prompt_tokens"]]):
        return "its prompt has log-probs, but was not sampled"
    if "beacon_id" in line:
        positions = line["positions"]
        if not (_is_count(line["beacon_id"]) and isinstance(positions, list) and all(map(_is_count, positions))):
            return "beacon_id and positions are not whole numbers from 0 on"
        if len(positions) != len(line["tokens"]):
            return f"there are {len(positions)} positions, but {len(line['tokens'])} tokens"
    if "choices" in line:
        response = range(line["num_prompt_tokens"], len(line["tokens"]))
        if not isinstance(line["choices"], list) or not all(_is_count(i) and i in response for i in line["choices"]):
            return "choices are not places of its response"
    return None


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_logprob(value) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -3e38 < value <= 1e-4  # rounding may give a little more than 0
