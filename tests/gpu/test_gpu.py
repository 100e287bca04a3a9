"""The same equations on a CUDA device, and memory as the device itself counts it."""

import json

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.compressors import STANDALONE
from tests.helpers.gpu import SMALL, eagerly, mean_gap, on_gpu
from tests.helpers.models import ARCHITECTURES, prompts_of

NEW_TOKENS = 128

pytestmark = pytest.mark.gpu
FUSED = ("qwen2", "qwen3", "llama", "qwen3-moe", "mixtral")


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
@pytest.mark.parametrize("compressor", STANDALONE)
def test_shadow_view_equals_sampler(compressor, architecture):
    model = on_gpu(architecture)
    engine = Engine(model, compressor=compressor, budget=20, interval=16, rows=4)
    for t in engine.generate(prompts_of(5, 36, 100), group_size=2, sampling=Sampling(60)):
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
        assert gap[t.num_prompt_tokens :].abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gemma2", "olmo2", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("compressor", ["rkv", "h2o", "prompt-only", "dense"])
def test_captured_steps_are_the_eager_ones(name, compressor, monkeypatch):
    """Greedy, fp32: fused, captured through the modules or launched one by one, steps sample and evict the same."""
    model = on_gpu(name, **(SMALL if name != "gemma2" else {}))

    def rollout():
        engine = Engine(model, compressor=compressor, budget=32, interval=16, rows=8)
        done = engine.generate(prompts_of(*[12, 30, 7, 50, 64, 5, 20, 33]), sampling=Sampling(64, temperature=0.0))
        return engine, done

    engine, captured = rollout()
    (decoder,) = engine.decoders.values()
    assert decoder.graphs and (decoder.forward is not None) == (name in FUSED and compressor != "h2o")
    eagerly(monkeypatch)
    engine, eager = rollout()
    assert next(iter(engine.decoders.values())).graphs is None
    for a, b in zip(captured, eager, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert torch.equal(a.trace.evicted_at, b.trace.evicted_at)
        assert (a.sampler_logprobs - b.sampler_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_teacher_forced_logprobs_of_captured_samples(name):
    model = on_gpu(name, **SMALL)
    engine = Engine(model, budget=48, interval=16, rows=16)
    for t in engine.generate(prompts_of(*[20] * 4, 90, 7), group_size=4, sampling=Sampling(200)):
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
        assert gap[t.num_prompt_tokens :].abs().max() < 1e-4


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {}),
        ("llama", SMALL),
        ("qwen2", SMALL),
        ("qwen3", SMALL),
        ("llama", SMALL | dict(intermediate_size=4096)),
    ],
)
def test_bf16_gap_is_at_the_noise_floor_of_dense_rollouts(name, changes):
    """In bf16 the shadow view differs from the sampler by what any two bf16 kernels differ by."""
    model = on_gpu(name, torch.bfloat16, **changes)

    def rollout(compressor):
        engine = Engine(model, compressor=compressor, budget=32, interval=16, rows=16)
        return engine.generate(prompts_of(*[20] * 16), group_size=4, sampling=Sampling(100))

    noise = mean_gap(model, rollout("dense"), shadow=False)
    sparse = rollout("rkv")
    assert mean_gap(model, sparse, shadow=True) < 1.5 * noise
    assert mean_gap(model, sparse, shadow=False) > 3 * noise


def test_a_product_in_parts_is_the_product():
    from sparse_rl.rollout.fused import parts_for, side_by_side

    linear = torch.nn.Linear(8192, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(100, 8192, device="cuda", dtype=torch.bfloat16)
    parts = side_by_side(linear).in_parts(x)
    assert parts.shape == (parts_for(100, 256, 8192), 100, 256) and len(parts) > 1 and parts.dtype == torch.float32
    expected = x.double() @ linear.weight.double().T
    assert ((parts.double().sum(0) - expected).norm() / expected.norm()) < 1e-5


def test_rows_that_wait():
    model = on_gpu("llama", **SMALL)
    engine = Engine(model, budget=32, interval=128, rows=8)
    trajectories = engine.generate(prompts_of(3, 11, 18, 26, 35, 41, 60, 77), group_size=2, sampling=Sampling(400))
    assert engine.waited > 0
    assert mean_gap(model, trajectories, shadow=True) < 1e-5


def test_after_an_update_nothing_is_captured_again():
    model = on_gpu("llama", **SMALL)
    engine = Engine(model, budget=32, interval=16, rows=8)
    engine.generate(prompts_of(20), group_size=8, sampling=Sampling(60))
    (decoder,) = engine.decoders.values()
    graphs = dict(decoder.graphs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    trajectories = engine.generate(
        prompts_of(20), group_size=8, sampling=Sampling(40)
    )  # fewer tokens: the same graphs serve
    assert engine.decoders == {next(iter(engine.decoders)): decoder} and all(
        decoder.graphs[w] is g for w, g in graphs.items()
    )
    assert mean_gap(model, trajectories, shadow=True) < 1e-5
    model.lm_head.weight.data = model.lm_head.weight.data * 0.5  # moved: captured anew
    assert mean_gap(model, engine.generate(prompts_of(20), group_size=8, sampling=Sampling(40)), shadow=True) < 1e-5
    assert decoder not in engine.decoders.values()


@pytest.mark.parametrize("compressor", ["rkv", "h2o"])
def test_another_budget_needs_no_new_capture(compressor):
    model = on_gpu("llama", **SMALL)
    engine = Engine(model, compressor=compressor, budget=64, interval=16, rows=8)
    engine.generate(prompts_of(20, 90), group_size=4, sampling=Sampling(100, temperature=0.0))
    (decoder,) = engine.decoders.values()
    graphs, nbytes = dict(decoder.graphs), engine.cache.nbytes
    for budget in (32, 48):
        engine.set_budget(budget)
        mine = engine.generate(prompts_of(20, 90), group_size=4, sampling=Sampling(100, temperature=0.0))
        made = Engine(model, compressor=compressor, budget=budget, interval=16, rows=8)
        for a, b in zip(
            mine, made.generate(prompts_of(20, 90), group_size=4, sampling=Sampling(100, temperature=0.0)), strict=True
        ):
            assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)
        assert mean_gap(model, mine, shadow=True) < 1e-5
    assert list(engine.decoders.values()) == [decoder] and all(decoder.graphs[w] is g for w, g in graphs.items())
    assert engine.cache.nbytes == nbytes


def test_a_model_that_cannot_be_captured_runs_all_the_same(monkeypatch):
    model = on_gpu("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, output: output[0].sum().item() and None)
    engine = Engine(model, budget=32, interval=16, rows=4)
    with pytest.warns(UserWarning, match="cannot be captured"):
        trajectories = engine.generate(prompts_of(20, 9), sampling=Sampling(60))
    assert mean_gap(model, trajectories, shadow=True) < 1e-5


def test_the_tail_of_a_batch_runs_narrow():
    model = on_gpu("llama")
    engine = Engine(model, compressor="window", budget=32, interval=16, rows=16)
    done = engine.generate(prompts_of(*[9] * 16), sampling=Sampling(300, stop_ids=(3,)))
    (decoder,) = engine.decoders.values()
    assert len(decoder.graphs) > 1 and set(decoder.graphs) <= {16, 8, 4}
    assert mean_gap(model, done, shadow=True) < 1e-5


def test_device_memory_does_not_grow_with_the_response():
    model = on_gpu("llama")
    grown = {}
    for new in (64, 2048):
        engine = Engine(model, compressor="rkv", budget=32, interval=16, rows=8)
        engine.generate(prompts_of(*[10] * 8), sampling=Sampling(new))  # captures what the next call replays
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.generate(prompts_of(*[10] * 8), sampling=Sampling(new))
        grown[new] = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() - before < 2**20  # nothing stays behind
        del engine
    records = 8 * (2048 - 64) * (8 + 4 + 3 * 2 * 2)  # rows x (token, log-prob, trace over 3 layers and 2 heads)
    assert grown[2048] - grown[64] < 2 * records


def test_two_steps_of_training(tmp_path):
    from sparse_rl.config import load_recipe
    from sparse_rl.train.run import train

    keys = {
        "run.steps": "2",
        "rollout.prompts": "8",
        "eval.every": "1",
        "eval.prompts": "16",
        "model.dtype": "bfloat16",
    }
    trainer = train(load_recipe("tiny-sums", list(keys.items())), tmp_path / "run", show=False)
    assert next(trainer.learner.model.parameters()).is_cuda
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["update/loss"] for line in lines if "update/loss" in line]
    assert len(losses) == 2 and all(abs(loss) < 10 for loss in losses)


def test_out_of_memory_is_explained():
    from sparse_rl import OutOfMemory

    with pytest.raises(OutOfMemory, match=r"use rows=\d+"):
        Engine(on_gpu("llama"), budget=512, interval=128, rows=10**8)
