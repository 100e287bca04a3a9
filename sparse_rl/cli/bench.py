"""`sparse-rl bench`: measure speed on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .options import Budget, CompressorName, Dtype, Interval

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench.callback()  # without a callback, typer would drop the word `rollout` from the only command
def _bench() -> None: ...


@bench.command("rollout")
def bench_rollout(
    model_shape: Annotated[
        str, typer.Option(help="`tiny`, or a shape such as qwen2.5-1.5b: random weights, no download.")
    ] = "qwen2.5-1.5b",
    compressor: CompressorName = "rkv",
    budget: Budget = 512,
    interval: Interval = 128,
    rows: Annotated[int, typer.Option(help="Sequences, all decoded at the same time.")] = 256,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.")] = 256,
    new: Annotated[int, typer.Option(help="New tokens per sequence; no sequence stops early.")] = 3840,
    repeats: Annotated[int, typer.Option(help="Timed runs, of which the median is reported.")] = 3,
    peer: Annotated[
        str | None, typer.Option(help="`transformers`: also time model.generate on the same prompts.")
    ] = None,
    peer_new: Annotated[int, typer.Option(help="New tokens per sequence for the peer.")] = 128,
    slots: Annotated[str, typer.Option(help="How slots store keys and values: model, fp8 or int8.")] = "model",
    dtype: Dtype = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Time whole rollouts of a model with random weights: tokens/s, milliseconds per step, memory, shares of time."""
    from ..bench import Setting, measure, summary

    setting = Setting(model_shape, compressor, budget, interval, rows, prompt, new, repeats, peer, peer_new, slots)
    result = measure(setting, dtype, device)
    typer.echo(json.dumps(result) if as_json else summary(result))
