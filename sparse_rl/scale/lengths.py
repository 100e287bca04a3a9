"""Draw response lengths for the scale model, from a lognormal distribution or from those of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ..errors import SparseRLError
from ..files import read_lines

# assumption: share of the variance (of log lengths, or of normalised ranks) that completions of a prompt share
SAME_PROMPT = 0.5
SPREAD = 0.75  # assumption: standard deviation over mean


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths: that of the `given` lengths, drawn by rank; without any, a lognormal one."""

    mean: float
    spread: float  # standard deviation over mean
    given: tuple[int, ...] = ()

    def __post_init__(self):
        if not (0 < self.mean < math.inf and 0 <= self.spread < math.inf):
            raise SparseRLError(
                f"response lengths have mean {self.mean} and spread {self.spread}; "
                "the mean must be positive, the spread not negative, and both finite."
            )

    def draw(self, prompts: int, group: int, longest: int, seed: int) -> np.ndarray:
        """Lengths in tokens, cut at `longest`. [prompts, group]"""
        random = np.random.default_rng(seed)
        common, own = random.standard_normal((prompts, 1)), random.standard_normal((prompts, group))
        normal = SAME_PROMPT**0.5 * common + (1 - SAME_PROMPT) ** 0.5 * own
        if self.given:
            ranks = np.vectorize(NormalDist().cdf)(normal)
            return np.quantile(np.minimum(self.given, longest), ranks, method="inverted_cdf")
        variance = math.log(1 + self.spread**2)
        log = math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal
        return np.clip(np.exp(log).round(), 1, longest).astype(np.int64)


def lengths_of_run(folder: Path) -> Lengths:
    """The lengths in a run's samples, scaled to the mean in its metrics.

    If the run wrote no samples: a lognormal distribution with that mean and the usual spread.
    """
    found = [line.get("rollout/length/mean") for line in read_lines(folder / "metrics.jsonl")]
    means = [mean for mean in found if isinstance(mean, (int, float)) and 0 < mean < 1e12]
    if not means:
        raise SparseRLError(
            f"{folder}/metrics.jsonl holds no steps with rollout/length/mean; give the folder of a run with some steps."
        )
    mean, seen = sum(means) / len(means), []
    for path in sorted(folder.glob("samples/step-*/trajectories.jsonl")):
        for line in read_lines(path):
            tokens, prompt = line.get("tokens"), line.get("num_prompt_tokens")
            if not isinstance(tokens, list) or type(prompt) is not int or not 0 <= prompt <= len(tokens):
                raise SparseRLError(
                    f"{path} has a line without tokens and num_prompt_tokens; remove the line or the file, then "
                    "continue."
                )
            seen.append(len(tokens) - prompt - sum(end - begin for begin, end in line.get("given", ())))
    if not any(seen):
        return Lengths(mean, SPREAD)
    scale = mean * len(seen) / sum(seen)
    return Lengths(mean, float(np.std(seen) / np.mean(seen)), tuple(max(1, round(scale * n)) for n in seen))
