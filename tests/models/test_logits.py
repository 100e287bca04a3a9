"""Logits in fp32 from weights in bf16: less noise, right gradients, and a model that stays what it was."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling, SparseRLError, load_model, token_logprobs
from sparse_rl.beacon import add_beacon
from sparse_rl.config import make_recipe
from sparse_rl.learn.score import head, hidden_states
from sparse_rl.learn.student import copied
from sparse_rl.models import with_lora
from sparse_rl.models.logits import Float32Head, head_of, set_logits
from sparse_rl.rollout.capture import addresses
from sparse_rl.rollout.fused import FusedForward, is_plain
from sparse_rl.train.checkpoint import save_model
from tests.helpers.logits import bf16, mean_gap
from tests.helpers.models import prompts_of

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("compressor, view", [("dense", "dense"), ("rkv", "shadow"), ("snapkv", "shadow")])
def test_sampler_and_learner_come_closer(compressor, view):
    model = bf16(tie_word_embeddings=False)
    before = mean_gap(set_logits(model, "model"), compressor, view)
    after = mean_gap(set_logits(model), compressor, view)
    assert after < before / 3, (before, after)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3", "olmo2", "smollm3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_an_fp32_head_on_the_same_states(name, tied):
    capped = {"final_logit_softcapping": 30.0} if name == "gemma2" else {}
    model = set_logits(bf16(name, tie_word_embeddings=tied, **capped))
    tokens = torch.tensor(prompts_of(20))
    with torch.no_grad():
        states = hidden_states(model, tokens).last_hidden_state  # bf16 [1, T, hidden]
        logits = model(tokens).logits
        expected = states.float() @ model.get_output_embeddings().weight.float().T
        if name == "gemma2":
            expected = 30 * (expected / 30).tanh()  # in fp32, though nobody told it so
    assert states.dtype == torch.bfloat16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
    assert head(model, hidden_states(model, tokens), states[0]).dtype == torch.float32


def test_a_model_in_fp32_is_not_touched():
    model, tokenizer = load_model("tiny-sums", device="cpu")
    other, _ = load_model("tiny-sums", device="cpu", logits="model")
    assert type(model.lm_head) is type(other.lm_head) is nn.Linear
    tokens = torch.tensor([tokenizer.encode("1+2+3=")])
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    rounded, _ = load_model("tiny-sums", "bfloat16", device="cpu")
    assert type(rounded.lm_head) is Float32Head and rounded(tokens).logits.dtype == torch.float32
    back = rounded.float()  # whose weights are fp32 is an ordinary layer again
    assert torch.equal(back.lm_head(torch.eye(96)), nn.functional.linear(torch.eye(96), back.lm_head.weight))
    for name in ("tiny", "tiny-sums"):
        assert type(load_model(name, "bfloat16", device="cpu", logits="model")[0].lm_head) is nn.Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 32), (2, 5, 32), (0, 32)])
def test_gradients_are_those_of_fp64(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(32, 50, bias=bias).bfloat16()
    exact = copy.deepcopy(layer).double()
    layer.__class__ = Float32Head
    x = torch.randn(shape).bfloat16().requires_grad_()
    y = x.detach().double().requires_grad_()
    out, expected = layer(x), exact(y)
    assert out.dtype == torch.float32 and out.shape == (*shape[:-1], 50)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape).double()
    (out.log_softmax(-1) * weights.float()).sum().backward()
    (expected.log_softmax(-1) * weights).sum().backward()
    pairs = [(x.grad, y.grad), *((p.grad, q.grad) for p, q in zip(layer.parameters(), exact.parameters()))]
    for ours, theirs in pairs:
        assert ours.dtype == torch.bfloat16
        small = 1e-6 * float(theirs.abs().sum() + 1)
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=small)  # one rounding


def test_a_frozen_head_gets_no_gradient_and_autocast_does_not_round():
    model = set_logits(bf16(tie_word_embeddings=False))
    model.lm_head.requires_grad_(False)
    tokens = torch.tensor(prompts_of(9))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens).logits
    logits.logsumexp(-1).sum().backward()
    assert logits.dtype == torch.float32 and model.lm_head.weight.grad is None
    assert not torch.equal(logits, logits.bfloat16().float())
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_copies_adapters_and_beacons_keep_it():
    model = set_logits(bf16())
    for other in (copy.deepcopy(model), copied(model), add_beacon(copied(model), (4,))):
        assert type(other.lm_head) is Float32Head
    adapted = with_lora(copied(model), 4, 8)
    assert type(head_of(adapted)) is Float32Head and type(adapted.merge_and_unload().lm_head) is Float32Head
    tokens = torch.tensor(prompts_of(9))
    assert with_lora(copied(model), 4, 8)(tokens).logits.dtype == torch.float32


def test_a_head_with_an_adapter_of_its_own():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(set_logits(bf16(tie_word_embeddings=False)), LoraConfig(target_modules=["lm_head"], r=4))
    assert type(head_of(model)) is Float32Head and model(torch.tensor(prompts_of(9))).logits.dtype == torch.float32
    assert type(head_of(set_logits(model, "model"))) is nn.Linear and type(head_of(set_logits(model))) is Float32Head


def test_files_are_as_before(tmp_path):
    model, tokenizer = load_model("tiny", "bfloat16", device="cpu")
    plain, _ = load_model("tiny", "bfloat16", device="cpu", logits="model")
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, saved in (("ours", model), ("plain", plain)):
        save_model(tmp_path / name, saved, tokenizer)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    again, _ = load_model(str(tmp_path / "ours"), device="cpu")
    assert type(again.lm_head) is Float32Head
    assert type(load_model(str(tmp_path / "ours"), device="cpu", logits="model")[0].lm_head) is nn.Linear


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_fused_kernels_take_it(name):
    model = bf16(name)
    plain = addresses(model)
    assert is_plain(model) and is_plain(set_logits(model))
    assert addresses(model) != plain  # a captured step is captured anew
    engine = Engine(model, "rkv", budget=16, interval=8, rows=4)
    assert FusedForward.fits(model, engine.cache)
    model.lm_head.__class__ = type("Other", (Float32Head,), {})
    assert not is_plain(model)


@pytest.mark.parametrize("compressor", ["dense", "rkv"])
def test_what_is_sampled_does_not_depend_on_the_rows_beside_it(compressor):
    model = set_logits(bf16())
    whole, alone = (Engine(model, compressor, budget=16, interval=8, rows=rows) for rows in (6, 1))
    prompts = prompts_of(9, 30, 12)
    together = whole.generate(prompts, 2, Sampling(40, stop_ids=()), seed=1)
    for ours, theirs in zip(together, alone.generate(prompts, 2, Sampling(40, stop_ids=()), seed=1), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.sampler_logprobs, theirs.sampler_logprobs)
        with torch.no_grad():
            token_logprobs(model, ours.tokens, ours.trace)


def test_settings():
    data = {"model": {"name": "tiny"}, "task": {"name": "sums"}}
    assert make_recipe(data).model.logits == "float32"
    assert make_recipe(data, [("model.logits", "model")]).model.logits == "model"
    with pytest.raises(SparseRLError, match=r"model\.logits is 'bf16'; it must be float32, or model"):
        make_recipe({**data, "model": {"name": "tiny", "logits": "bf16"}})
    with pytest.raises(SparseRLError, match="logits is 'half'; it must be float32"):
        load_model("tiny", logits="half")
    model = bf16()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.warns(UserWarning, match="is a Sequential, which cannot give logits in fp32"):
        set_logits(model)


def test_the_benchmark_runs(tmp_path):
    small = "--device cpu --rows 4 --prompts 2 --group 2 --new 12 --budget 16 --interval 8 --repeats 1"
    script, out = "benchmarks/logits_noise.py", str(tmp_path / "n.json")
    command = [sys.executable, script, "tiny:2x64", "--out", out, *small.split()]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    found = json.loads((tmp_path / "n.json").read_text())["caches"]
    for cache in ("dense", "rkv"):
        for how in ("model", "float32"):
            assert found[cache][how]["tokens"] > 0 and 0 < found[cache][how]["xi_5"] <= 1
            assert found[cache][how]["tokens_per_s"] > 0 and found[cache][how]["rounding_alone"] > 0


def test_the_benchmark_of_half_precisions_runs(tmp_path, monkeypatch):
    """On the same weights float16 rounds eight times finer than bfloat16, so the gap is smaller, dense and replayed."""
    small = "--device cpu --rows 4 --prompts 2 --group 2 --new 12 --budget 16 --interval 8 --repeats 1"
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import half_precision

    out = str(tmp_path / "half.json")
    monkeypatch.setattr(sys, "argv", ["half_precision.py", "tiny:2x64", "--out", out, *small.split()])
    half_precision.main()
    for found in json.loads((tmp_path / "half.json").read_text())["found"].values():
        coarse, fine = found["bfloat16"], found["float16"]
        assert 0 < fine["mean_abs_gap"] < coarse["mean_abs_gap"] <= coarse["max_abs_gap"] < 0.2
        assert all(row[key] > 0 for row in found.values() for key in ("tokens_per_s", "score_ms", "update_ms"))


def test_shards_keep_it(tmp_path):
    """One process whose learner is divided (among itself): the same logits, and gradients in fp32 masters."""
    import torch.distributed as dist

    from sparse_rl.learn.score import batch_logprobs
    from sparse_rl.learn.shards import full, shard

    whole = set_logits(bf16())
    tokens = torch.tensor(prompts_of(20))
    asked = torch.arange(20)[None] > 0
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        divided = shard(copied(whole), 1)
        ours = divided(lambda model: batch_logprobs(model, tokens, asked))
        logits = divided(lambda model: model(tokens).logits.clone())
        ours.sum().backward()
        gradient = full(divided.model.lm_head.weight.grad)
    finally:
        dist.destroy_process_group()
    theirs = batch_logprobs(whole, tokens, asked)
    theirs.sum().backward()
    assert logits.dtype == torch.float32 and torch.equal(ours, theirs) and gradient.dtype == torch.float32
    expected = whole.lm_head.weight.grad.float()
    torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
