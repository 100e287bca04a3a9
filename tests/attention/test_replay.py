"""A forward pass under the trace reproduces the sampler's log-probs, for every compressor and architecture."""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.compressors import STANDALONE
from tests.helpers.models import ARCHITECTURES, prompts_of, tiny

SETTINGS = [(12, 4, 40), (20, 16, 60)]  # budget, interval, new tokens


def gaps(model, trajectory, temperature=1.0):
    """Largest difference to the sampler's log-probs in the shadow and in the dense view."""
    with torch.no_grad():
        views = [token_logprobs(model, trajectory.tokens, trace, temperature) for trace in (trajectory.trace, None)]
    response = slice(trajectory.num_prompt_tokens, None)
    return [(view - trajectory.sampler_logprobs)[response].abs().max().item() for view in views]


@pytest.mark.parametrize("budget, interval, new", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compressor", STANDALONE)
def test_shadow_view_equals_sampler(compressor, architecture, budget, interval, new):
    model = tiny(architecture)
    engine = Engine(model, compressor=compressor, budget=budget, interval=interval, rows=4)
    prompts = prompts_of(
        5, budget + interval, 3 * (budget + interval), seed=budget
    )  # shorter than, equal to, beyond capacity
    trajectories = engine.generate(prompts, group_size=2, sampling=Sampling(max_new_tokens=new), seed=1)
    assert len(trajectories) == 6
    differs = 0.0
    for trajectory in trajectories:
        shadow, dense = gaps(model, trajectory)
        assert shadow < 1e-4
        differs = max(differs, dense)
        evicted = bool((trajectory.trace.evicted_at.long() < len(trajectory.tokens)).any())
        chosen = engine.compressor
        assert evicted == (chosen.evicts_response or (chosen.evicts and trajectory.num_prompt_tokens > budget))
    if compressor == "dense":
        assert differs < 1e-4
    else:
        assert differs > 1e-2


def test_replay_at_other_temperatures(llama):
    engine = Engine(llama, compressor="rkv", budget=12, interval=4, rows=2)
    for temperature in (0.5, 1.7):
        trajectory = engine.generate(prompts_of(30), sampling=Sampling(40, temperature=temperature))[0]
        shadow, dense = gaps(llama, trajectory, temperature)
        assert shadow < 1e-4 < 1e-2 < dense


def test_replay_holds_in_float64():
    """In fp64 the agreement is at fp64's own rounding: it is an identity, not a coincidence of fp32."""
    model = tiny("qwen3").double()
    try:
        engine = Engine(model, compressor="snapkv", budget=12, interval=4, rows=2)
        trajectory = engine.generate(prompts_of(30), sampling=Sampling(60))[0]
        with torch.no_grad():
            logits = replay_logits(model, trajectory)
        replayed = logits[:-1].log_softmax(-1).gather(1, trajectory.tokens[1:, None])[:, 0]
        gap = (replayed - trajectory.sampler_logprobs[1:].double())[trajectory.num_prompt_tokens - 1 :]
        assert gap.abs().max() < 1e-6  # log-probs are stored in fp32
    finally:
        model.float()


def replay_logits(model, trajectory):
    from sparse_rl.attention import Given, giving, use_attention
    from sparse_rl.learn.score import replay_of

    tokens = trajectory.tokens[None]
    replay = replay_of(model, [(trajectory.tokens, trajectory.trace)])
    with use_attention(model, "shadow"), giving(Given(torch.arange(tokens.shape[1])[None], replay=replay)):
        return model(tokens, use_cache=False).logits[0]


def test_shadow_gradients_survive_checkpointing(llama):
    """Layers recomputed during backward must see the trace too, though the forward pass ended long ago."""
    engine = Engine(llama, compressor="tova", budget=12, interval=4, rows=1)
    trajectory = engine.generate(prompts_of(20), sampling=Sampling(30))[0]

    def gradients(trace):
        llama.zero_grad()
        token_logprobs(llama, trajectory.tokens, trace).sum().backward()
        return torch.cat([p.grad.flatten() for p in llama.parameters()])

    plain, dense = gradients(trajectory.trace), gradients(None)
    llama.gradient_checkpointing_enable()
    llama.train()
    try:
        checkpointed = gradients(trajectory.trace)
        checkpointed_dense = gradients(None)
    finally:
        llama.eval()
        llama.gradient_checkpointing_disable()
        llama.zero_grad()
    torch.testing.assert_close(checkpointed, plain)
    torch.testing.assert_close(checkpointed_dense, dense)
    assert (plain - dense).abs().max() > 1e-2


def test_rollouts_in_train_mode_with_checkpointing_are_the_same(llama):
    engine = Engine(llama, compressor="rkv", budget=12, interval=4, rows=2)
    before = engine.generate(prompts_of(20), sampling=Sampling(30))[0]
    llama.gradient_checkpointing_enable()
    llama.train()
    try:
        during = engine.generate(prompts_of(20), sampling=Sampling(30))[0]
        assert llama.training and all(m.training for m in llama.modules())
    finally:
        llama.eval()
        llama.gradient_checkpointing_disable()
    assert during.tokens.equal(before.tokens)
    assert during.sampler_logprobs.equal(before.sampler_logprobs)


def test_model_is_left_as_found(llama):
    parameters = {name: p.clone() for name, p in llama.named_parameters()}
    before = llama.config._attn_implementation
    tokens = torch.tensor([prompts_of(20)[0]])
    with torch.no_grad():
        logits = llama(tokens).logits
        trajectory = Engine(llama, budget=12, interval=4).generate(prompts_of(20), sampling=Sampling(30))[0]
        token_logprobs(llama, trajectory.tokens, trajectory.trace)
        assert llama.config._attn_implementation == before
        assert llama(tokens).logits.equal(logits)
    assert all(p.equal(parameters[name]) for name, p in llama.named_parameters())


def test_nothing_is_registered_before_use():
    """In a fresh process: importing everything leaves transformers' registry alone."""
    import subprocess
    import sys

    code = (
        "import sparse_rl, sparse_rl.rollout, sparse_rl.learn.score, sparse_rl.attention\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f\n"
        "assert 'slots' not in f and 'shadow' not in f, list(f)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_trace_of_another_trajectory_is_refused(llama):
    engine = Engine(llama, budget=12, interval=4)
    long, short = (engine.generate(prompts_of(20), sampling=Sampling(n))[0] for n in (30, 20))
    with pytest.raises(ValueError, match=r"\(3, 2, 40\).*\(3, 2, 50\)"):
        token_logprobs(llama, long.tokens, short.trace)
