"""The learner through fused kernels against the modules: same log-probs, gradients and next weights; nothing stays.

On a CPU the learner uses no kernels. Here it is told to, and either their twins run or, in Triton's interpreter, the
kernels themselves.
"""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels import ops
from sparse_rl.kernels.modules import fused, fused_forward
from sparse_rl.learn import score as scoring
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.head import plain_head, vocabulary_part
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.score import batch_logprobs, hidden_states, logprobs_of, replay_of, statistics_of
from sparse_rl.models import set_logits
from tests.helpers.decoding import change_rules
from tests.helpers.largest import Largest
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
MIXTURES = ("qwen3-moe", "mixtral")  # all but their experts
ROOT = Path(__file__).parent.parent.parent


def use(monkeypatch, way: str) -> None:
    if way != "modules":
        change_rules(monkeypatch, fuses_learning=True)
    if way == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(ops, "place_of", lambda tensor: ops.Place("cuda", triton=True))
        monkeypatch.setitem(ops.KERNELS, "trace_attention", ())  # its kernels have tests of their own


def rollouts(model, new=24, temperature=1.0):
    engine = Engine(model, budget=12, interval=4, rows=4)
    return engine.generate(prompts_of(5, 20), 2, Sampling(new, stop_ids=(7,), temperature=temperature))


def found_by(model, done, shadow: bool, temperature=0.8):
    """Log-probs of a padded micro-batch, and all gradients."""
    sampled = collate(done)
    replay = replay_of(model, [(t.tokens, t.trace) for t in done]) if shadow else None
    model.zero_grad()
    with fused(model):
        logprobs = batch_logprobs(model, sampled.tokens, sampled.mask, temperature, replay)
        logprobs.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach(), gradients


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, theirs in expected[1].items():
        off = (found[1][name] - theirs).abs().max()
        assert off <= tolerance * max(1.0, theirs.abs().max().item()), name


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("name", [*FAMILY, *MIXTURES, "gemma2", "phi3", "smollm3"])
def test_log_probs_and_gradients_are_those_of_the_modules(name, shadow, monkeypatch):
    model = copy.deepcopy(tiny(name, **({"final_logit_softcapping": 4.0} if name == "gemma2" else {})))
    done = rollouts(model)
    expected = found_by(model, done, shadow)
    use(monkeypatch, "twins")
    assert (plain_head(model) is not None) == (name in (*FAMILY, *MIXTURES, "gemma2"))
    assert_close(found_by(model, done, shadow), expected, 2e-4)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_kernels_in_a_model(adapters, monkeypatch):
    """Under a trace, and with adapters, of which one projection's output is a sum."""
    model = copy.deepcopy(tiny("qwen3", num_hidden_layers=1))
    done = rollouts(model, 8)[1:3]
    if adapters:
        model = _adapted(model)
    expected = found_by(model, done, True)
    use(monkeypatch, "kernels")
    assert_close(found_by(model, done, True), expected, 2e-4)


@pytest.mark.parametrize("shadow", [False, True])
def test_in_fp64_layers_and_head_compute_the_same(shadow, monkeypatch):
    """By their twins: only fp32 and half precisions have a kernel. (tests/learn/test_exact.py compares exactly.)"""
    model = copy.deepcopy(tiny("qwen3")).double()
    done = rollouts(tiny("qwen3"))
    expected = found_by(model, done, shadow)
    use(monkeypatch, "twins")
    assert plain_head(model) is not None
    assert_close(found_by(model, done, shadow), expected, 1e-5)  # the modules compute norms in fp32


@pytest.mark.parametrize("name", [*FAMILY, *MIXTURES])
def test_every_part_of_the_family_is_fused(name, monkeypatch):
    use(monkeypatch, "twins")
    model, calls = tiny(name), []
    monkeypatch.setattr(ops, "add_and_norm", _counted(ops.add_and_norm, "norm", calls))
    monkeypatch.setattr(ops, "silu_gate", _counted(ops.silu_gate, "gate", calls))
    monkeypatch.setattr(ops, "rotate", _counted(ops.rotate, "rotate", calls))
    with torch.no_grad(), fused(model):
        model(torch.tensor(prompts_of(6)), use_cache=False)
    norms = 2 + 2 * name.startswith("qwen3")  # per layer
    assert [calls.count(x) for x in ("norm", "gate", "rotate")] == [3 * norms + 1, 3 * (name in FAMILY), 3]


def _counted(function, name, calls):
    return lambda *given: calls.append(name) or function(*given)


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_stays(error, monkeypatch):
    """Instances are what they were, also after an error inside; classes never change."""
    use(monkeypatch, "twins")
    model = copy.deepcopy(tiny("qwen3"))
    before = [dict(vars(m)) for m in model.modules()]
    classes = {type(m): dict(vars(type(m))) for m in model.modules()}
    try:
        with fused(model):
            assert "forward" in vars(model.model.norm) and "forward" in vars(model.model.layers[0])
            with fused(model):  # again: nothing is left to do, nor to undo
                pass
            assert "forward" in vars(model.model.norm)
            if error:
                raise error
    except ValueError:
        assert error
    assert [dict(vars(m)) for m in model.modules()] == before
    assert all(dict(vars(kind)) == was for kind, was in classes.items())


def test_a_critic_beside_the_policy_is_fused_with_it(monkeypatch):
    from sparse_rl.learn.critic import Critic

    policy, trunk = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama"))
    critic, sampled = Critic(policy, trunk), collate(rollouts(policy))
    critic.weight.data.normal_()
    found = []
    for way in ("modules", "twins"):
        with monkeypatch.context() as patch, torch.no_grad():
            use(patch, way)
            with fused(policy, critic), fused(policy, None):
                assert (
                    ("forward" in vars(trunk.model.norm)) == ("forward" in vars(policy.model.norm)) == (way == "twins")
                )
                states = hidden_states(policy, sampled.tokens)
                found.append(critic(states, sampled.tokens, sampled.mask))
    assert not any("forward" in vars(m) for model in (policy, critic) for m in model.modules())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_cpu_changes_nothing():
    model = copy.deepcopy(tiny("llama"))
    with fused(model):
        assert not any("forward" in vars(m) for m in model.modules())
    assert plain_head(model) is None


def test_what_was_changed_by_others_is_left_to_them(monkeypatch):
    use(monkeypatch, "twins")
    model = copy.deepcopy(tiny("llama"))
    first, second, third = model.model.layers
    first.post_attention_layernorm.register_forward_hook(lambda module, args, output: 2 * output)
    second.mlp.act_fn = nn.GELU()
    third.self_attn.forward = lambda *args, **kwargs: (_ for _ in ()).throw(SparseRLError("called"))
    assert fused_forward(first) is None and fused_forward(first.mlp) is not None
    assert fused_forward(second.mlp) is None and fused_forward(second) is not None
    assert fused_forward(third.self_attn) is None
    with fused(model), pytest.raises(SparseRLError, match="called"):
        model(torch.tensor(prompts_of(6)), use_cache=False)
    del third.self_attn.forward
    tokens = torch.tensor(prompts_of(6))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        with fused(model):
            torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)

    class Other(type(first.mlp)):
        pass

    first.mlp.__class__ = Other
    assert fused_forward(first.mlp) is None


@pytest.mark.parametrize("change", ["hook", "bias", "dtype", "wrapped", "subclass"])
def test_a_head_that_does_more_than_its_product_is_called(change, monkeypatch):
    use(monkeypatch, "twins")
    model = copy.deepcopy(tiny("llama"))
    assert plain_head(model) is not None
    head = model.lm_head
    if change == "hook":
        head.register_forward_hook(lambda module, args, output: output)
    elif change == "bias":
        head.bias = nn.Parameter(torch.zeros(len(head.weight)))
    elif change == "dtype":  # logits in bf16, as asked for
        model.bfloat16()
        assert plain_head(set_logits(model)) is not None
        set_logits(model, "model")
    elif change == "wrapped":
        model.lm_head = nn.Sequential(head)
    else:
        model.__class__ = type("Scaled", (type(model),), {})
    assert plain_head(model) is None


def test_a_head_under_autocast_is_called(monkeypatch):
    use(monkeypatch, "twins")
    with torch.autocast("cpu"):
        assert plain_head(tiny("llama")) is None
    assert plain_head(tiny("llama")) is not None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(checkpointing, monkeypatch):
    """Adapters around linear layers stay in force; weights that are frozen get no gradient."""
    model = _adapted(copy.deepcopy(tiny("qwen2")))
    done = rollouts(tiny("qwen2"))
    _checkpoint(model, checkpointing)
    expected = found_by(model, done, True)
    assert all("lora_" in name for name in expected[1])
    use(monkeypatch, "twins")
    assert_close(found_by(model, done, True), expected, 2e-4)


def _adapted(model):
    pytest.importorskip("peft")
    from sparse_rl.models import with_lora

    torch.manual_seed(0)
    model = with_lora(model, rank=4, alpha=8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def _checkpoint(model, on: bool) -> None:
    model.train(on)
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("shadow", [False, True])
def test_gradient_checkpointing_computes_layers_again_by_the_same_kernels(shadow, monkeypatch):
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    expected = found_by(model, done, shadow)
    use(monkeypatch, "twins")
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(count)
    found_by(model, done, shadow)
    once, runs = runs, 0
    _checkpoint(model, True)
    assert_close(found_by(model, done, shadow), expected, 2e-4)
    assert runs == 2 * once  # computed again


def test_a_backward_pass_after_the_with_is_refused_not_wrong(monkeypatch):
    """Layers that are computed again by their modules do not match what the kernels saved."""
    model = copy.deepcopy(tiny("qwen3", num_hidden_layers=1))
    tokens = torch.tensor(prompts_of(6))
    use(monkeypatch, "kernels")
    _checkpoint(model, True)
    with fused(model):
        value = batch_logprobs(model, tokens, torch.arange(6)[None] > 0).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        value.backward()


def test_the_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import learner_gpu

    command = ["learner_gpu.py", "--model", "tiny", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--ways", "modules,fused", "--views", "shadow"])
    learner_gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    stages, apart = [x for x in lines if "stage" in x], [x for x in lines if "gradients" in x]
    assert [(x["stage"], x["way"]) for x in stages] == [
        (s, w) for s in ("score", "update") for w in ("modules", "fused")
    ]
    assert all(x["ms"] > 0 for x in stages)
    assert apart[1]["way"] == "fused" and apart[1]["gradients"] < 2 * apart[0]["gradients_to_fp32"]


@pytest.mark.parametrize("method", ["sparse-rl", "shadow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_learner(method, dtype, monkeypatch):
    """Old log-probs, metrics and next weights, in fp32 packed too. In bf16 a step moves weights by their rounding."""
    settings = OptimizerSettings(lr=1e-3)
    found = []
    for way in ("modules", "twins"):
        with monkeypatch.context() as patch:
            model = set_logits(copy.deepcopy(tiny("qwen3", tie_word_embeddings=method == "shadow")).to(dtype))
            done = rollouts(model, 12, 0.8)
            use(patch, way)
            packing = way == "twins" and dtype == torch.float32
            view = "shadow" if method == "shadow" else "dense"
            scored = score(model, collate(done), 64, 0.8, view=view, packing=packing)
            rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
            advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
            correction = PRESETS["none" if method == "shadow" else method]
            (batch,) = batches_of(scored, advantages, correction, Loss())
            _checkpoint(model, True)
            result = Learner(model, settings, Loss(), temperature=0.8, micro_batch_tokens=64, packing=packing).step(
                batch
            )
            found.append(
                (scored, result.metrics, torch.cat([p.detach().flatten().float() for p in model.parameters()]))
            )
    (scored, metrics, weights), (expected, others, theirs) = found
    fine = dtype == torch.float32
    for name in ("old_logprobs", "entropies"):
        torch.testing.assert_close(
            getattr(scored, name), getattr(expected, name), rtol=1e-4, atol=1e-4 if fine else 0.1
        )
    assert ((scored.ranks - expected.ranks).abs() > 0).float().mean() < (0.01 if fine else 0.2)
    assert metrics.keys() == others.keys()
    for name in metrics:
        assert metrics[name] == pytest.approx(others[name], rel=1e-3 if fine else 0.1, abs=1e-4 if fine else 0.02), name
    moved = (weights - theirs).abs()
    assert moved.max() < 2.1e-3 + (0 if fine else 0.02) and (moved > 1e-4).float().mean() < (0.02 if fine else 0.2)


def test_statistics_come_from_one_pass(monkeypatch):
    """Log-probs to the bit those of `logprobs_of`; entropies and ranks those that scoring finds."""
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    sampled = collate(done)
    for way in ("modules", "twins"):
        with monkeypatch.context() as patch:
            use(patch, way)
            states = hidden_states(model, sampled.tokens)
            found = statistics_of(model, states, sampled.tokens, sampled.mask, 0.8)
            alone = logprobs_of(model, states, sampled.tokens, sampled.mask, 0.8)
            assert torch.equal(found[0], alone)
            assert found[0].requires_grad and not any(x.requires_grad for x in found[1:])
            scored = score(model, sampled, 10_000, 0.8)
            for ours, theirs in zip(found, (scored.old_logprobs, scored.entropies, scored.ranks), strict=True):
                torch.testing.assert_close(ours.detach(), theirs, rtol=1e-4, atol=1e-4)
            first, second = (
                torch.autograd.grad(x.sum(), model.lm_head.weight, retain_graph=True)[0] for x in (found[0], alone)
            )
            assert torch.equal(first, second)


@pytest.mark.parametrize("way", ["twins", "kernels"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_the_head_in_chunks_and_parts(way, softcap, monkeypatch):
    """Any number of tokens, chunks that do not divide it, a frozen head; exact in fp64 through the entropy too."""
    from sparse_rl.learn.head import PlainHead

    use(monkeypatch, way)
    dtype = torch.float32 if way == "kernels" else torch.float64
    generator = torch.Generator().manual_seed(0)
    for tokens, chunk in ((1, 8), (13, 4), (13, 100), (0, 8)):
        hidden = torch.randn(tokens, 24, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(1000, 24, generator=generator).to(dtype).requires_grad_()
        targets = torch.randint(0, 1000, (tokens,), generator=generator)
        up = torch.randn(2, tokens, generator=generator).double()
        logprobs, entropies, ranks = PlainHead(weight, softcap).statistics(hidden, targets, 0.7, chunk)
        assert not ranks.requires_grad
        found = torch.autograd.grad((up[0] * logprobs + up[1] * entropies).sum(), (hidden, weight))
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        z = exact[0] @ exact[1].t()
        z = (z if softcap is None else torch.tanh(z / softcap) * softcap) / 0.7
        all_logprobs = z.log_softmax(-1)
        chosen = all_logprobs.gather(1, targets[:, None])[:, 0]
        spread = -(all_logprobs.exp() * all_logprobs).sum(-1)
        expected = torch.autograd.grad((up[0] * chosen + up[1] * spread).sum(), exact)
        tolerance = 1e-4 if way == "kernels" else 1e-10
        for a, b in zip((logprobs, entropies, *found), (chosen, spread, *expected), strict=True):
            torch.testing.assert_close(a.double(), b.detach(), rtol=tolerance, atol=tolerance)
        (alone,) = torch.autograd.grad(
            PlainHead(weight.detach(), softcap).statistics(hidden, targets, 0.7, chunk)[0].sum(), hidden
        )
        (both,) = torch.autograd.grad(
            PlainHead(weight, softcap).statistics(hidden, targets, 0.7, chunk)[0].sum(), hidden
        )
        assert torch.equal(alone, both)


def test_logits_exist_for_two_chunks_at_most(monkeypatch):
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    tokens = int(collate(done).mask.sum())
    assert tokens > 40
    use(monkeypatch, "twins")
    monkeypatch.setattr(scoring, "head_chunk", lambda vocabulary: 8)
    assert tokens * vocabulary_part(tokens, 61, 8) <= 2 * 8 * 61
    with Largest() as seen:
        found_by(model, done, True)
    assert seen.rows == 8


def test_parts_of_a_vocabulary():
    assert vocabulary_part(16384, 151936, 1024) == 18944 and vocabulary_part(65536, 151936, 1024) == 4608
    assert vocabulary_part(1, 151936, 1024) == 151936 and vocabulary_part(0, 61, 1024) == 61
    assert vocabulary_part(10**7, 151936, 1024) == 31 and vocabulary_part(10**9, 151936, 1024) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_that_is_divided_among_processes(checkpointing, tmp_path, monkeypatch):
    """One process whose learner is divided (among itself): the same gradients."""
    import torch.distributed as dist

    from sparse_rl.learn.shards import full, shard

    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    sampled = collate(done)
    expected = found_by(model, done, False)
    use(monkeypatch, "twins")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        _checkpoint(model, checkpointing)
        divided = shard(model, 1)
        with fused(divided.model):
            assert all("forward" in vars(layer) for layer in divided.model.model.layers)
            logprobs = divided(lambda inside: batch_logprobs(inside, sampled.tokens, sampled.mask, 0.8))
            logprobs.square().sum().backward()
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    finally:
        dist.destroy_process_group()
    assert_close((logprobs.detach(), gradients), expected, 2e-4)
