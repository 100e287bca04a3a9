"""The same equations on a CUDA device, and memory as the device itself counts it."""

import copy

import pytest
import torch
from conftest import ARCHITECTURES, prompts_of, tiny
from test_parity import NEW_TOKENS

from sparse_rl import COMPRESSORS, Engine, Sampling, token_logprobs

pytestmark = pytest.mark.gpu


def on_gpu(name: str, dtype=torch.float32):
    return copy.deepcopy(tiny(name)).to("cuda", dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_dense_rollouts_equal_generate(architecture):
    model = on_gpu(architecture)
    prompts = prompts_of(3, 40, 17)
    engine = Engine(model, compressor="dense", rows=2)
    trajectories = engine.generate(prompts, sampling=Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0))
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        expected = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert trajectory.tokens.tolist() == expected[0].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "smollm3"])
@pytest.mark.parametrize("compressor", list(COMPRESSORS))
def test_shadow_view_equals_sampler(compressor, architecture):
    model = on_gpu(architecture)
    engine = Engine(model, compressor=compressor, budget=20, interval=16, rows=4)
    for t in engine.generate(prompts_of(5, 36, 100), group_size=2, sampling=Sampling(60)):
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
        assert gap[t.num_prompt_tokens :].abs().max() < 1e-4


def test_bf16_gap_is_at_the_noise_floor_of_dense_rollouts():
    """In bf16 the shadow view differs from the sampler by what any two bf16 kernels differ by."""
    model = on_gpu("llama", torch.bfloat16)

    def mean_gap(compressor, shadow):
        engine = Engine(model, compressor=compressor, budget=32, interval=16, rows=16)
        gaps = []
        for t in engine.generate(prompts_of(*[20] * 16), group_size=4, sampling=Sampling(100)):
            with torch.no_grad():
                gap = token_logprobs(model, t.tokens, t.trace if shadow else None).cpu() - t.sampler_logprobs
            gaps.append(gap[t.num_prompt_tokens :].abs())
        return torch.cat(gaps).mean().item()

    noise = mean_gap("dense", shadow=False)
    assert mean_gap("rkv", shadow=True) < 1.5 * noise
    assert mean_gap("rkv", shadow=False) > 5 * noise


def test_device_memory_does_not_grow_with_the_response():
    model = on_gpu("llama")
    grown = {}
    for new in (64, 2048):
        engine = Engine(model, compressor="rkv", budget=32, interval=16, rows=8)
        engine.generate(prompts_of(10), sampling=Sampling(2))  # warm up
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.generate(prompts_of(*[10] * 8), sampling=Sampling(new))
        grown[new] = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() - before < 2**20  # nothing stays behind
        del engine
    records = 8 * (2048 - 64) * (8 + 4 + 3 * 2 * 2)  # rows x (token, log-prob, trace over 3 layers and 2 heads)
    assert grown[2048] - grown[64] < 2 * records


def test_out_of_memory_is_explained():
    from sparse_rl import OutOfMemory

    with pytest.raises(OutOfMemory, match=r"use rows=\d+"):
        Engine(on_gpu("llama"), budget=512, interval=128, rows=10**8)
