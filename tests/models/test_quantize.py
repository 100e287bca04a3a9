"""4-bit weights under adapters: load, plan, sample, learn, resume, export. On a CPU, where bitsandbytes is there."""

import builtins
import json

import pytest
import torch
from transformers import GPT2Config

import sparse_rl.train.warmup as warmup_module
from sparse_rl.errors import SparseRLError
from sparse_rl.models import load_config, load_model
from sparse_rl.models.quantize import dequantise, quantised_bytes, quantised_layers
from sparse_rl.train.run import plan_run, train
from tests.helpers.models import tiny
from tests.helpers.runs import recipe, run

MODEL = {"name": "tiny:2x64", "dtype": "bfloat16", "lora_rank": 4, "quantize": "4bit"}


def test_without_bitsandbytes_there_is_a_sentence(monkeypatch):
    plain = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(SparseRLError, match=r"4-bit weights need bitsandbytes: pip install 'sparse-rl\[qlora\]'"):
        load_model("tiny:2x64", quantize="4bit", device="cpu")


@pytest.mark.parametrize(
    "model, said",
    [
        ({"quantize": "8bit", "lora_rank": 4}, "model.quantize is '8bit'"),
        ({"quantize": "4bit"}, "model.lora_rank is 0"),
        ({"quantize": "4bit", "lora_rank": 4, "shard": True}, "model.shard divides"),
    ],
)
def test_what_cannot_be_is_refused(model, said):
    with pytest.raises(SparseRLError, match=said):
        recipe(model={"name": "tiny", **model})


def test_the_plan_of_7b_fits_24_gb():
    whole = load_config("qwen2.5-7b")
    assert 5.5e9 < quantised_bytes(whole, torch.bfloat16) < 6.1e9  # 6.5e9 weights in 4 bits, 1.1e9 in 16
    plan = plan_run(recipe(model={**MODEL, "name": "qwen2.5-7b"}), 300)
    assert plan.rollout.weight_bytes == quantised_bytes(whole, torch.bfloat16)


@pytest.mark.others
def test_weights_take_four_bits_and_give_the_logits_of_what_they_stand_for():
    pytest.importorskip("bitsandbytes")
    model, _ = load_model("tiny:2x64", "bfloat16", "cpu", quantize="4bit")
    plain, _ = load_model("tiny:2x64", "bfloat16", "cpu")
    again, _ = load_model("tiny:2x64", "bfloat16", "cpu", quantize="4bit")
    tokens = torch.arange(1, 9)[None]
    ours, exact = model(tokens).logits, plain(tokens).logits
    assert ours.equal(again(tokens).logits)  # the same weights give the same bits
    held = sum(p.nbytes for n, p in model.named_parameters() if "proj" in n)
    assert held == sum(p.nbytes for n, p in plain.named_parameters() if "proj" in n) // 4
    ours_again = model(tokens, labels=tokens).logits
    ours_again.sum().backward()  # the grad mode goes another way through the library
    torch.testing.assert_close(ours_again, ours, rtol=0, atol=0.05)
    dequantise(model)
    twin = model(tokens).logits
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    twin.sum().backward()
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, gradient, rtol=0.05, atol=0.5)
    assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}
    torch.testing.assert_close(model(tokens).logits, ours, rtol=0, atol=0.02)
    assert 0 < (ours - exact).abs().mean() < exact.abs().mean()


@pytest.mark.others
def test_a_run_learns_resumes_and_is_exported(tmp_path):
    """Rollouts from the 4-bit model, replayed exactly; a resumed run writes the same bytes."""
    pytest.importorskip("bitsandbytes")
    keys = {
        "eval": {"every": 0},
        "learn": {"method": "shadow"},
        "model": {**MODEL, "gradient_checkpointing": "offload", "dtype": None},
    }
    task = tmp_path / "digits.py"
    task.write_text(
        "def prompt(i): return f'{i}+{i}=', str(2 * i)\n\n\n"
        "def reward(answer, text): return sum(letter.isdigit() for letter in text) / 64\n"
    )
    keys |= {"task": {"name": str(task)}, "optimizer": {"lr": 1e-2}}
    whole = train(recipe(**keys, run={"steps": 2, "samples": 0}), tmp_path / "whole", show=False)
    before = {n: p.detach().clone() for n, p in whole.model.named_parameters()}
    assert any("lora_B" in n and p.any() for n, p in before.items())
    train(recipe(**keys, run={"steps": 1, "samples": 0}), tmp_path / "run", show=False)
    train(recipe(**keys, run={"steps": 2, "samples": 0}), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    first, second = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[:2])
    assert first["update/grad_norm"] > 0 and second["update/grad_norm"] > 0
    newest = tmp_path / "run/checkpoints/step-000002"
    assert json.loads((newest / "sparse_rl.json").read_text())["quantize"] == "4bit"
    loaded, _ = load_model(str(newest), device="cpu")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = whole.model.eval()(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=0.05)
        done = run("export", newest, "--to", tmp_path / "merged", "--merge", "--trust")
        assert done.returncode == 0, done.stderr
        merged, _ = load_model(str(tmp_path / "merged"), device="cpu")
        torch.testing.assert_close(merged(tokens).logits.float(), expected.float(), rtol=0, atol=0.05)


@pytest.mark.others
def test_a_warm_up_of_adapters_on_four_bits_writes_the_model_that_it_trained(tmp_path):
    pytest.importorskip("bitsandbytes")
    trained, save = [], warmup_module.save_model

    def noting(folder, model, tokenizer):
        with torch.no_grad():
            trained.append(model.eval()(torch.arange(1, 9)[None]).logits.float())
        save(folder, model, tokenizer)

    settings = recipe(model={**MODEL, "name": "tiny-sums"}, warmup={"steps": 3, "batch": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup_module, "save_model", noting)
        warmup_module.warmup(settings, tmp_path / "model", evaluate=False, show=False)
    adapters, merged = trained
    torch.testing.assert_close(merged, adapters, rtol=0, atol=0.3)  # bf16
    plain = load_model("tiny-sums", "bfloat16", "cpu")[0](torch.arange(1, 9)[None]).logits.float()
    assert (merged - adapters).abs().mean() < (plain - adapters).abs().mean() / 2
    assert load_model(str(tmp_path / "model"), device="cpu")[0].dtype == torch.bfloat16


def test_a_model_without_linear_layers_is_refused():
    """GPT-2 has transposed ones of its own."""
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(SparseRLError, match="GPT2LMHeadModel has no ordinary linear layers"):
        quantised_bytes(config, torch.bfloat16)


def test_experts_that_are_one_tensor_keep_their_dtype():
    model = tiny("qwen3-moe")
    layers = quantised_layers(model)
    assert layers and not any("experts" in name for name in layers)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert quantised_bytes(model.config, torch.bfloat16) > 2 * experts > 0
