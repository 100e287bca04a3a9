"""The record of one sampled completion or conversation (`Trajectory`), and how trajectories are written and read back.

Shapes: T tokens of a trajectory (prompt + response), L layers, H KV heads. All tensors live on the CPU.
"""

from __future__ import annotations

import json
import os
from collections import Counter
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
    """One completion with the evidence of how it was sampled.

    In a conversation tokens that the policy sampled and tokens that it was given (a tool's output, a user's next turn)
    follow one another after the prompt, under one trace. A run of sampled tokens is a turn.
    """

    tokens: Tensor  # int64 [T]: prompt, then response (its stop token included)
    num_prompt_tokens: int
    sampler_logprobs: Tensor  # fp32 [T]: under the distribution that was sampled from; 0 if it was not sampled
    trace: Trace  # what every query could see; evicted_at [L, H, T]
    finish_reason: str  # "stop": a stop token was sampled; "length": max_new_tokens were sampled
    prompt_index: int  # which prompt of the call
    sample_index: int  # which member of its group
    version: int = 0  # optimizer steps behind the weights that sampled it, and trainings behind a scorer that learns
    beacon_id: int | None = None  # stands in `tokens` where a beacon was fed; its log-prob is 0, unless it was chosen
    positions: Tensor | None = None  # int64 [T]: RoPE positions, if they differ from the feed indices
    # bool [T]: where the policy chose to fold (at the beacon) or to go on (at the token fed next), and this choice is
    # part of the log-prob; None: it does not choose its folds
    choices: Tensor | None = None
    support: Support | None = None  # which tokens could be drawn, where top-k or top-p left some out and a learner asks
    given: Tensor | None = None  # bool [T]: after the prompt, what the policy did not sample; None: it sampled all
    renewed: int = 0  # how often its conversation was begun anew: earlier turns are in its prompt, under this trace
    stream: int | None = None  # of its random numbers (streams.py); files do not have it

    @property
    def prompt_tokens(self) -> Tensor:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def response_tokens(self) -> Tensor:
        """The sampled tokens; beacons are not sampled, nor is what others wrote."""
        return self.tokens[self.response_mask]

    @property
    def response_mask(self) -> Tensor:
        """bool [T]: the sampled tokens."""
        response = torch.arange(len(self.tokens)) >= self.num_prompt_tokens
        if self.given is not None:
            response &= ~self.given
        return response if self.beacon_id is None else response & (self.tokens != self.beacon_id)

    @property
    def action_mask(self) -> Tensor:
        """bool [T]: everything that the policy chose, and that has a log-prob: tokens, and the folds of its choice."""
        return self.response_mask if self.choices is None else self.response_mask | self.choices

    @property
    def num_given_tokens(self) -> int:
        return 0 if self.given is None else int(self.given.sum())

    @property
    def turns(self) -> list[slice]:
        """Where the policy spoke: one slice of the tokens after the prompt for every run without given tokens.

        Beacons belong to the turn in which they stand.
        """
        others = torch.zeros(len(self.tokens), dtype=torch.bool) if self.given is None else self.given.clone()
        others[: self.num_prompt_tokens] = True
        edges = torch.nn.functional.pad(~others, (1, 1)).int().diff()
        starts, ends = ((edges == way).nonzero()[:, 0].tolist() for way in (1, -1))
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    @property
    def num_text_tokens(self) -> int:
        """The tokens of prompt and conversation, whoever wrote them; beacons are none."""
        return self.num_prompt_tokens + len(self.response_tokens) + self.num_given_tokens


def kv_tokens_saved(trajectories: Sequence[Trajectory]) -> float:
    """1 - slots in use at the end / tokens, over all trajectories; the Sparse-RL paper counts this way."""
    slots = sum(t.trace.slots_in_use().double().mean().item() for t in trajectories)
    return 1 - slots / sum(t.num_text_tokens for t in trajectories)


def entries(trajectory: Trajectory) -> Tensor:
    """Cache entries that each query of the response saw, its own included: the mean over layers and KV heads. fp64 [Q]

    The Q queries are the tokens fed after the prompt, beacons and given ones included; the last token is never fed. If
    nothing was fed after the prompt, the result is the number of prompt tokens.
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
        self._named: Counter[tuple[int, int]] = Counter()  # files of a prompt and a sample

    def write(self, trajectory: Trajectory, prompt: str | None = None, text: str | None = None, **more) -> None:
        """`prompt`, `text` and `more` are for human readers; the record is complete without them."""
        if self._file is None:
            with writing(self.lines):
                (self.folder / "traces").mkdir(parents=True, exist_ok=True)
                self._file = self.lines.open("a", encoding="utf-8")
        which = trajectory.prompt_index, trajectory.sample_index
        again = f"-{self._named[which]}" if self._named[which] else ""  # conversations may have equal numbers
        self._named[which] += 1
        trace = f"traces/{which[0]:06d}-{which[1]:03d}{again}.safetensors"
        trajectory.trace.save(self.folder / trace)
        beacons = {}
        if trajectory.beacon_id is not None:
            assert trajectory.positions is not None
            beacons = {"beacon_id": trajectory.beacon_id, "positions": trajectory.positions.tolist()}
        if trajectory.choices is not None:
            beacons["choices"] = trajectory.choices.nonzero()[:, 0].tolist()
        turns = {} if trajectory.given is None else {"given": _runs(trajectory.given)}
        renewed = {"renewed": trajectory.renewed} if trajectory.renewed else {}
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
            **turns,
            **renewed,
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
        given=_from_runs(line["given"], len(line["tokens"])) if "given" in line else None,
        renewed=line.get("renewed", 0),
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
    counts = {name: line[name] for name in ("num_prompt_tokens", "prompt_index", "sample_index", "version")}
    for name, value in (counts | {"renewed": line.get("renewed", 0)}).items():
        if not _is_count(value):
            return f"{name} is {value!r}, not a whole number from 0 on"
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
    if "given" in line and (why := _why_not_given(line)) is not None:
        return why
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


def _runs(which: Tensor) -> list[list[int]]:
    """Where a mask is on, as [begin, end] of every run. bool [T]"""
    edges = torch.nn.functional.pad(which, (1, 1)).int().diff()
    return torch.stack([(edges == way).nonzero()[:, 0] for way in (1, -1)], 1).tolist()


def _from_runs(runs: list[list[int]], length: int) -> Tensor:
    which = torch.zeros(length, dtype=torch.bool)
    for begin, end in runs:
        which[begin:end] = True
    return which


def _why_not_given(line: dict) -> str | None:
    """Why `given` cannot be where others wrote, or None: runs after the prompt, in order, without log-probs."""
    runs, last = line["given"], line["num_prompt_tokens"]
    if not isinstance(runs, list):
        return f"given is {type(runs).__name__}, not a list of [begin, end]"
    choices = line.get("choices")
    for run in runs:
        if not (isinstance(run, list) and len(run) == 2 and all(map(_is_count, run))):
            return f"given holds {run!r:.40}, not [begin, end] with whole numbers"
        if not last <= run[0] < run[1] <= len(line["tokens"]):
            return (
                f"given holds {run}, but its runs follow one another after the {line['num_prompt_tokens']} tokens of "
                f"the prompt, within {len(line['tokens'])} tokens"
            )
        if any(line["sampler_logprobs"][run[0] : run[1]]):
            return f"tokens {run[0]} to {run[1] - 1} were given, but have log-probs as if they had been sampled"
        if isinstance(choices, list) and any(i in range(*run) for i in choices):
            return f"there are choices at tokens {run[0]} to {run[1] - 1}, which were given"
        last = run[1]
    return None


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_logprob(value) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -3e38 < value <= 1e-4  # rounding may give a little more than 0
