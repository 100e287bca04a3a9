"""Run folders with given lines."""

import json

import torch

from sparse_rl.cache import Trace


def plant(folder, metrics=(), timing=(), recipe="learn: {method: tis}\n"):
    """A run folder with these lines, given as values or as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("timing.jsonl", timing)):
        if lines is not None:
            data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
            (folder / name).write_bytes(data)
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder


STEPS = [{"step": s, "reward/mean": s / 10} for s in range(1, 5)]


def sample(folder, step, lines, layers=2, heads=2):
    """Samples of a step, each with a trace in which the first token is gone early."""
    samples = folder / "samples" / f"step-{step:06d}"
    (samples / "traces").mkdir(parents=True)
    for i, line in enumerate(lines):
        tokens = len(line["tokens"])
        evicted_at = torch.full((layers, heads, tokens), 65535, dtype=torch.int32)
        evicted_at[0, 0, 0] = min(2, tokens)
        Trace(evicted_at.to(torch.uint16)).save(samples / "traces" / f"{i}.safetensors")
    text = "".join(json.dumps({"trace": f"traces/{i}.safetensors", **line}) + "\n" for i, line in enumerate(lines))
    (samples / "trajectories.jsonl").write_text(text)
    return samples


LINE = {
    "num_prompt_tokens": 1,
    "tokens": [3, 4, 5],
    "sampler_logprobs": [0.0, -1.0, -2.0],
    "old_logprobs": [0.0, -1.5, -2.0],
}
