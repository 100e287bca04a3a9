"""`make demo`: compressed rollouts of a tiny model, what they save, and the proof that the trace replays them.

The model has random weights, so its text means nothing; memory, speed and the two gaps are real. Once training exists the
demo will train it.
"""

import time

import torch
from rich.console import Console
from rich.table import Table

from .compressors import COMPRESSORS
from .learn.score import token_logprobs
from .models import load_model
from .plan import size
from .records import kv_tokens_saved
from .rollout import Engine, Sampling

PROMPTS = ["3+4+1+9+2+6+5+8=", "Once upon a time there was a cache that ", "7+7="]
ROWS, GROUP, NEW_TOKENS, BUDGET, INTERVAL = 12, 4, 512, 64, 16


def run() -> None:
    model, tokenizer = load_model("tiny")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=())
    table = Table(title=f"{len(PROMPTS)} prompts x {GROUP} samples x {NEW_TOKENS} tokens; budget {BUDGET}, interval {INTERVAL}")
    table.add_column("", no_wrap=True)
    for column in ("KV cache", "bytes saved", "tokens saved", "tokens/s", "gap, shadow", "gap, dense"):
        table.add_column(column, justify="right")
    for name in COMPRESSORS:
        engine = Engine(model, compressor=name, budget=BUDGET, interval=INTERVAL, rows=ROWS)
        start = time.perf_counter()
        trajectories = engine.generate(prompts, GROUP, sampling)
        seconds = time.perf_counter() - start
        tokens = sum(len(t.response_tokens) for t in trajectories)
        shadow, dense = (max(gap(model, t, view) for t in trajectories) for view in ("shadow", "dense"))
        table.add_row(
            name,
            size(engine.cache.nbytes),
            f"{engine.kv_bytes_saved(trajectories):.0%}",
            f"{kv_tokens_saved(trajectories):.0%}",
            f"{tokens / seconds:,.0f}",
            f"{shadow:.1e}",
            f"{dense:.1e}",
        )
    console = Console()
    console.print(table)
    console.print("bytes saved: allocated cache against dense rows of the longest sequence; tokens saved: slots at the end against tokens.")
    console.print("gap: the largest |log-prob in that view - the sampler's log-prob| of any sampled token, in nats.")
    console.print("The shadow view replays the trace and agrees to rounding; the dense view is what an uncorrected learner would train on.")


@torch.no_grad()
def gap(model, trajectory, view: str) -> float:
    replayed = token_logprobs(model, trajectory.tokens, trajectory.trace if view == "shadow" else None)
    return (replayed.cpu() - trajectory.sampler_logprobs)[trajectory.num_prompt_tokens :].abs().max().item()
