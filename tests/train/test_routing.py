"""Runs of mixtures of experts: `learn.replay_routing`, resumed to the byte, by several processes, with adapters."""

import warnings

import pytest
import torch
import transformers

from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.kernels import ops
from sparse_rl.models import load_model, tiny_tokenizer
from sparse_rl.models.routing import Routing
from sparse_rl.records import read_trajectories
from sparse_rl.train.parts import replayed_routing
from sparse_rl.train.run import plan_run, train
from tests.helpers.decoding import change_rules
from tests.helpers.runs import recipe, run, weights, write_recipe
from tests.models.test_routing import phimoe

SHORT = {
    "rollout": {
        "compressor_options": {"protect_prompt": False},
        **dict(budget=12, interval=4, rows=8, prompts=2, group_size=4, max_new_tokens=24),
    },
    "eval": {"every": 0},
}


DIGITS = """
def prompt(i):
    return f"{i} + {i} =", 2 * i

def reward(answer, text):
    return sum(letter.isdigit() for letter in text) / 24  # random weights sample some more, some fewer
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A tiny Qwen3-MoE with the tokenizer of our tiny models, as a folder."""
    folder, tokenizer = tmp_path_factory.mktemp("moe"), tiny_tokenizer()
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "digits.py").write_text(DIGITS)
    return str(folder)


def sections(mixture, method="shadow", steps=2, **learn):
    return {
        **SHORT,
        "model": {"name": mixture},
        "task": {"name": f"{mixture}/digits.py"},
        "learn": {"method": method, "minibatches": 2, "micro_batch_tokens": 200, **learn},
        "run": {"steps": steps, "checkpoint_every": 2, "diagnose": 1, "samples": 2},
    }


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


def test_a_resumed_run_is_the_same_to_the_byte(mixture, tmp_path):
    train(recipe(**sections(mixture, steps=4)), tmp_path / "whole", show=False)
    train(recipe(**sections(mixture, steps=2)), tmp_path / "half", show=False)
    done = run("train", tmp_path / "half", "--resume", "--run.steps", 4, "--trust")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("update/grad_norm", 0) > 0] == [1, 2, 3, 4]
    folders = [tmp_path / name / "checkpoints" / "step-000004" for name in ("half", "whole")]
    ours, theirs = map(weights, folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(line["gap/abs/mean"] < 1e-4 for line in lines if "gap/abs/mean" in line)
    sampled = list(read_trajectories(tmp_path / "whole" / "samples" / "step-000004"))
    assert all(t.trace.routes.shape == (len(t.tokens), 2, 2) for t in sampled)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_in_half_precision_follows_the_sampler(mixture, tmp_path, monkeypatch, dtype):
    """As a GPU decodes: by the fused forward, experts by our product."""
    change_rules(monkeypatch, fuses=True, own_experts=(getattr(torch, dtype),))
    products = []
    product = ops.expert_product
    monkeypatch.setattr(ops, "expert_product", lambda *given: products.append(given[0].dtype) or product(*given))
    given = sections(mixture, steps=2)
    given["model"]["dtype"] = dtype
    train(recipe(**given), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert set(products) == {getattr(torch, dtype)}
    assert [line["step"] for line in lines if line.get("update/grad_norm", 0) > 0] == [1, 2]
    assert all(
        line["gap/abs/mean"] < (1e-3 if dtype == "float16" else 1e-2) for line in lines if "gap/abs/mean" in line
    )


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(mixture, tmp_path):
    for method in ("shadow", "tis"):
        given = write_recipe(tmp_path / method, **sections(mixture, method, steps=1))
        found = {}
        for processes in (1, 2):
            out = tmp_path / method / str(processes)
            done = run("train", given, "--out", out, "--num-processes", processes)
            assert done.returncode == 0, done.stderr
            found[processes] = read_lines(out / "metrics.jsonl")[-1]
        assert found[2] == pytest.approx(found[1], rel=1e-4, abs=1e-6)


def test_a_dense_run_with_checkpointing_and_adapters_learns(mixture, tmp_path):
    given = sections(mixture, "sparse-rl", steps=2, replay_routing=True)
    given["model"] |= {"lora_rank": 4, "gradient_checkpointing": True}
    train(recipe(**given), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("update/grad_norm", 0) > 0] == [1, 2]
    assert all(line["update/drift/mean"] == pytest.approx(0, abs=1e-2) for line in lines if "update/drift/mean" in line)


def test_what_cannot_be_replayed_is_refused_or_said(mixture):
    model = load_model(mixture)[0]
    assert replayed_routing(recipe(**sections(mixture)), model) == Routing(2, 8, 2)
    assert replayed_routing(recipe(**sections(mixture, replay_routing=False)), model) is None
    with pytest.warns(UserWarning, match=r"has routers \(PhimoeTopKRouter\) .* the learner chooses experts anew"):
        assert replayed_routing(recipe(**sections("phi")), phimoe()) is None
    with pytest.raises(SparseRLError, match=r"learn.replay_routing is true, but phi has routers .*; set it to auto"):
        replayed_routing(recipe(**sections("phi", replay_routing=True)), phimoe())
    dense = load_model("tiny")[0]
    with pytest.raises(SparseRLError, match=r"learn.replay_routing is true, but tiny has no experts"):
        replayed_routing(recipe(**sections("tiny", replay_routing=True)), dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replayed_routing(recipe(**sections("tiny")), dense) is None
    with pytest.raises(SparseRLError, match=r"learn.replay_routing is 'maybe'; it must be true, false or auto"):
        recipe(**sections(mixture, replay_routing="maybe"))


def test_the_plan_counts_experts_and_routes(mixture):
    model = load_model(mixture)[0]
    plan = plan_run(recipe(**sections(mixture)), prompt_tokens=20).rollout
    assert plan.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) > plan.weight_bytes / 2
    assert plan.routes_row_bytes == (20 + 24) * 2 * 2
    assert plan_run(recipe(**sections(mixture, "sparse-rl")), prompt_tokens=20).rollout.routes_row_bytes == 0
