"""Open engines on a CUDA device: captured steps with settings by row, and given tokens that are fed together."""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.gpu import on_gpu
from tests.helpers.models import prompts_of
from tests.rollout.test_live import held, plan_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "dense", "prompt-only"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_conversations_replay_under_one_trace(architecture, compressor):
    """More of them than rows, so some are parked and brought back."""
    model = on_gpu(architecture)
    engine = Engine(model, compressor, budget=16, interval=8, rows=5)
    with engine.open(64, 400) as live:
        chats = held(live, [plan_of(seed, temperature=1.0) for seed in range(9)])
        trajectories = [live.release(chat) for chat in chats]
        assert live.rows_in_use == 0
    for trajectory in trajectories:
        mask = trajectory.response_mask
        with torch.no_grad():
            found = token_logprobs(model, trajectory.tokens, trajectory.trace).cpu()
        assert len(trajectory.turns) == 8 and (found - trajectory.sampler_logprobs)[mask].abs().max() < 1e-3


def test_settings_belong_to_the_turn():
    """One captured step samples every row as a call with its settings alone does."""
    engine, (prompt,) = Engine(on_gpu("llama"), "rkv", budget=16, interval=8, rows=8), prompts_of(20)
    ways = [Sampling(20, 0.0), Sampling(9, 0.6), Sampling(20, 1.0, 5), Sampling(30, 1.0, 0, 0.7), Sampling(40, 2.0)]
    expected = [engine.generate([prompt], sampling=way, seed=3)[0] for way in ways]
    with engine.open(64, 200) as live:
        chats = [live.submit(prompt, way, 3) for way in ways]
        live.run()
        for chat, wanted in zip(chats, expected, strict=True):
            assert live.release(chat).tokens.equal(wanted.tokens)
        assert len(engine.decoder(None).graphs or ()) > 0
