"""From rows that are done to trajectories: their tokens, log-probs and traces are copied to the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..records import Trajectory
from .decode import RowState
from .fold import Folding
from .phases import Phases
from .queue import Row


def collect(
    rows: list[int],
    sequences: list[Row],
    counts: list[int],
    state: RowState,
    stop_ids: Tensor,
    folding: Folding | None,
    version: int,
    phases: Phases,
) -> list[Trajectory]:
    """The trajectories of rows that are done. sequences, counts (tokens sampled): those of `rows`"""
    prompts = [torch.tensor(sequence.waiting.prompt) for sequence in sequences]
    with phases("collect"):
        responses, logprobs = state.tokens[rows, : max(counts)].cpu(), state.logprobs[rows, : max(counts)].cpu()
        stopped = torch.isin(responses, stop_ids.cpu())
    with phases("trace"):
        if folding is None:
            evidence = traced(state, rows, sequences, prompts, counts, responses, logprobs)
        else:
            evidence = folding.evidence(rows, prompts, counts, responses, logprobs)
    return [
        Trajectory(
            **evidence[i],
            num_prompt_tokens=len(prompts[i]),
            finish_reason="stop" if stopped[i, count - 1] else "length",
            prompt_index=sequences[i].waiting.prompt_index,
            sample_index=sequences[i].sample_index,
            version=version,
        )
        for i, count in enumerate(counts)
    ]


def traced(
    state: RowState,
    rows: list[int],
    sequences: list[Row],
    prompts: list[Tensor],
    counts: list[int],
    responses: Tensor,
    logprobs: Tensor,
) -> list[dict[str, Any]]:
    """Tokens, log-probs and traces of rows, as fields of their trajectories. responses, logprobs [N, n]"""
    lengths = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    routes = state.routes_of(rows, [sequence.prompt_routes for sequence in sequences], counts)
    traces = [replace(t, routes=r) for t, r in zip(state.traces_of(rows, lengths), routes, strict=True)]
    return [
        {
            "tokens": torch.cat([prompt, response[:count]]),
            "sampler_logprobs": torch.cat([torch.zeros(len(prompt)), logprob[:count]]),
            "trace": trace,
        }
        for prompt, count, response, logprob, trace in zip(prompts, counts, responses, logprobs, traces, strict=True)
    ]
