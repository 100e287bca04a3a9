"""Turn finished rows into trajectories: copy their tokens, log-probs and traces to the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cache.support import MOST, Support
from ..errors import SparseRLError
from ..kernels.twins_sample import Kept
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
    records: str | None,
    version: int,
    phases: Phases,
) -> list[Trajectory]:
    """The trajectories of finished rows.

    sequences, counts (tokens sampled): those of `rows`; records: what was recorded of the tokens that could be drawn
    """
    prompts = [torch.tensor(sequence.waiting.prompt) for sequence in sequences]
    with phases("collect"):
        responses, logprobs = state.tokens[rows, : max(counts)].cpu(), state.logprobs[rows, : max(counts)].cpu()
        stopped = torch.isin(responses, stop_ids.cpu())
    with phases("trace"):
        if folding is None:
            evidence = traced(state, rows, sequences, prompts, counts, responses, logprobs)
        else:
            evidence = folding.evidence(rows, prompts, counts, responses, logprobs)
    done = [
        Trajectory(
            **evidence[i],
            num_prompt_tokens=len(prompts[i]),
            finish_reason="stop" if stopped[i, count - 1] else "length",
            prompt_index=sequences[i].waiting.prompt_index,
            sample_index=sequences[i].sample_index,
            version=version,
            stream=sequences[i].stream,
        )
        for i, count in enumerate(counts)
    ]
    if records is None:
        return done
    with phases("collect"):
        assert state.kept is not None
        width = max(counts)
        kept = Kept(*(tensor[rows, :width].cpu() for tensor in state.kept.tensors))
    return [replace(t, support=support_of(t, kept, i, records == "ids")) for i, t in enumerate(done)]


def support_of(trajectory: Trajectory, kept: Kept, row: int, has_ids: bool) -> Support:
    """What the sampler recorded about the tokens that could be drawn in a row. kept [N, n]"""
    mask = trajectory.response_mask
    count = kept.count[row, : int(mask.sum())]
    if len(count) and int(count.max()) > MOST:
        raise SparseRLError(
            f"prompt {trajectory.prompt_index}, sample {trajectory.sample_index}: {int(count.max())} tokens are "
            f"equally likely, but the learner renormalises over at most {MOST}; set top_k to 0 and top_p to 1, or use "
            "a model that prefers some tokens."
        )
    counts = torch.zeros(len(mask), dtype=torch.int32).masked_scatter(mask, count)
    margins = torch.zeros(len(mask)).masked_scatter(mask, kept.margin[row, : len(count)])
    ids = None
    if has_ids:
        listed = kept.ids[row, : len(count)]
        ids = listed[torch.arange(listed.shape[1]) < count[:, None]]
    return Support(counts, margins, ids)


def traced(
    state: RowState,
    rows: list[int],
    sequences: list[Row],
    prompts: list[Tensor],
    counts: list[int],
    responses: Tensor,
    logprobs: Tensor,
) -> list[dict[str, Any]]:
    """The tokens, log-probs and trace of each row, as fields of its trajectory. responses, logprobs [N, n]"""
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
