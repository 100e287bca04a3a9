"""Learning in the shadow view: log-probs, gradients, ratios and distillation against explicit masks and full
distributions in fp64.
"""

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface

from sparse_rl import Engine, Sampling, Trace
from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.learn import score as scoring
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import check_replay, collate, join, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.distill import DIRECTIONS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS, method
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.train.run import plan_run, train
from tests.helpers.compressors import STANDALONE
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny

STEADY = OptimizerSettings(lr=1e-3)


def rollouts(model, compressor="rkv", lengths=(5, 30, 14), new=40, group=2, temperature=1.0):
    engine = Engine(model, compressor=compressor, budget=12, interval=6, rows=6)
    return engine.generate(prompts_of(*lengths), group, Sampling(new, temperature, stop_ids=(7,)))


def explicit_logits(model, trajectory, shadow: bool) -> torch.Tensor:
    """[T, V] by attention written out, under a mask made of loops over the trace."""
    length = len(trajectory.tokens)
    evicted_at = trajectory.trace.evicted_at.to(torch.int64)
    layers, heads, _ = evicted_at.shape
    visible = torch.zeros(layers, heads, length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(q + 1):
            visible[:, :, q, k] = (evicted_at[:, :, k] > q) | (not shadow)

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mask = visible[module.layer_idx].repeat_interleave(groups, 0)
        weights = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    AttentionInterface.register("explicit", attention)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("explicit")
        return model(trajectory.tokens[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def masters_gradients(learner) -> dict[str, torch.Tensor]:
    """Where an optimizer with masters gathers them, in fp32."""
    names = [name for name, _ in learner.model.named_parameters()]
    found = {name: master.grad.clone() for name, master in zip(names, learner.optimizer.masters, strict=True)}
    learner.optimizer.clear()
    return found


def assert_close(mine, theirs, tolerance=1e-8):
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture(autouse=True)
def fp64_logits(monkeypatch):
    """The head's logits stay in fp64, so that an fp64 model is one throughout."""
    monkeypatch.setattr(
        torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(torch.float32)
    )


@pytest.mark.parametrize("compressor", STANDALONE)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_are_those_of_an_explicit_mask(compressor, name, checkpointing):
    if name != "llama" and Version(transformers.__version__) < Version("5.22"):
        pytest.skip("its norms in this version of transformers round to fp32, so there is no fp64 reference")
    done = rollouts(tiny(name), compressor)
    model = copy.deepcopy(tiny(name)).double()
    if name == "qwen3-moe":
        model.set_experts_implementation("eager")  # torch has no grouped product in fp64
    assert compressor == "dense" or any((t.trace.evicted_at.to(torch.int64) < len(t.tokens)).any() for t in done)
    sampled = collate(done)
    weights = torch.randn(sampled.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    replay = scoring.replay_of(model, [(t.tokens, t.trace) for t in done])
    states = scoring.hidden_states(model, sampled.tokens, replay)
    values = scoring.over_chunks(
        model, states, sampled.mask, scoring.chosen_logprobs(1.0), sampled.tokens[sampled.mask]
    )
    (values * weights[sampled.mask]).sum().backward()
    mine = gradients(model)
    model.eval()
    loss, expected = 0.0, []
    for i, t in enumerate(done):
        logprobs = explicit_logits(model, t, shadow=True).log_softmax(-1)[:-1].gather(1, t.tokens[1:, None])[:, 0]
        response = logprobs[t.num_prompt_tokens - 1 :]
        expected.append(response)
        loss = loss + (response * weights[i][sampled.mask[i]]).sum()
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-9, atol=1e-9)
    loss.backward()
    assert_close(mine, gradients(model))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_under_the_trace(checkpointing):
    """Gradients of LoRA's matrices equal those of an explicit mask in fp64."""
    pytest.importorskip("peft")
    from sparse_rl.models import with_lora

    torch.manual_seed(0)
    model = with_lora(copy.deepcopy(tiny("llama")), rank=4, alpha=8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    done = rollouts(model)
    model.double()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
    sampled = collate(done)
    replay = scoring.replay_of(model, [(t.tokens, t.trace) for t in done])
    scoring.batch_logprobs(model, sampled.tokens, sampled.mask, 1.0, replay).sum().backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    for t in done:
        logits = explicit_logits(model.get_base_model(), t, shadow=True)
        logprobs = logits.log_softmax(-1)[:-1].gather(1, t.tokens[1:, None])[:, 0]
        logprobs[t.num_prompt_tokens - 1 :].sum().backward()
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == theirs.keys() and all("lora_" in n for n in mine)
    assert_close(mine, theirs)


def test_bf16_under_the_trace():
    """In bf16 the view is the same up to rounding: far nearer to its own fp32 values than the dense view is."""
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    exact = score(model, collate(done), 10_000, view="shadow")
    rounded = score(copy.deepcopy(model).bfloat16(), collate(done), 10_000, view="shadow")
    dense = score(model, collate(done), 10_000, view="dense")
    mask = exact.sampled.mask
    off = (rounded.old_logprobs - exact.old_logprobs)[mask].abs().mean()
    assert 0 < off < 0.1 and 5 * off < (dense.old_logprobs - exact.old_logprobs)[mask].abs().mean()


@pytest.mark.parametrize("compressor", ["rkv", "window"])
def test_the_first_ratio_is_one_and_nothing_is_rejected(compressor):
    """In the shadow view the gap is rounding, so Sparse-RL's rejection and weights have nothing to do; in the dense
    view they have.
    """
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model, compressor)
    rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
    advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
    gaps = {}
    for view in ("dense", "shadow"):
        scored = score(model, collate(done), 64, view=view)
        gaps[view] = scored.gap.abs().max().item()
        (batch,) = batches_of(scored, advantages, PRESETS["sparse-rl"], Loss(), 1)
        if view == "shadow":
            assert (batch.mask == scored.sampled.mask).all() and (batch.weights[batch.mask] - 1).abs().max() < 1e-4
        found = Learner(copy.deepcopy(model), STEADY, Loss(), micro_batch_tokens=64).step(batch).metrics
        # Old and learner log-probs have the same view.
        assert abs(found["update/drift/mean"]) < 1e-5 and found["update/clip/frac"] == 0
    assert gaps["shadow"] < 1e-4 < 0.01 < gaps["dense"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_distillation_is_the_kl_of_the_full_distributions(direction):
    done = rollouts(tiny("llama"), temperature=0.7)
    scored = score(tiny("llama"), collate(done), 10_000, 0.7, view="shadow")
    model = copy.deepcopy(tiny("llama")).double()
    (batch,) = batches_of(scored, torch.zeros(len(done)), PRESETS["none"], Loss(mean="token-mean"), 1)
    kept = batch.mask.clone()
    kept[2], kept[4, ::2] = False, False  # as a correction would: a rejected trajectory, dropped tokens, weights
    scale = kept / kept.sum()
    batch = dataclasses.replace(batch, mask=kept, scale=scale, weights=torch.rand(kept.shape) + 2)
    learner = Learner(
        model,
        STEADY,
        Loss(mean="token-mean"),
        micro_batch_tokens=100,
        temperature=0.7,
        distill=direction,
        distill_weight=0.3,
    )
    sums = {"loss": 0.0, "distill": 0.0}
    for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])):
        for key, value in learner._backward(batch, rows)[0].items():
            if key in sums:
                sums[key] += value
    mine = masters_gradients(learner)
    total = 0.0
    for row, t in zip(kept, done, strict=True):
        dense, shadow = (
            explicit_logits(model, t, view).div(0.7).log_softmax(-1)[t.num_prompt_tokens - 1 : -1]
            for view in (False, True)
        )
        pair = {
            "dense-to-shadow": (dense, shadow.detach()),
            "shadow-to-dense-forward": (dense.detach(), shadow),
            "shadow-to-dense-reverse": (shadow, dense.detach()),
        }[direction]
        total = total + sum(
            torch.nn.functional.kl_div(pair[1][i], pair[0][i], reduction="sum", log_target=True)
            for i in range(len(dense))
            if row[t.num_prompt_tokens + i]
        )
    count = int(kept.sum())
    assert sums["distill"] == pytest.approx(total.item(), rel=1e-6) and total > 0.01
    assert sums["loss"] == pytest.approx(0.3 * total.item() / count, rel=1e-6)
    (0.3 * total / count).backward()
    assert_close(mine, masters_gradients(learner), 1e-5)


def test_with_distillation_trajectories_without_advantage_count():
    model = copy.deepcopy(tiny("llama"))
    scored = score(model, collate(rollouts(model)), 64, view="shadow")
    (batch,) = batches_of(scored, torch.zeros(6), PRESETS["none"], Loss(), 1)
    assert "update/empty/count" in Learner(copy.deepcopy(model), STEADY, Loss()).step(batch).metrics
    distilling = Learner(copy.deepcopy(model), STEADY, Loss(), distill="shadow-to-dense-forward")
    assert distilling.step(batch).metrics["update/distill/mean"] > 0
    with pytest.raises(SparseRLError, match="needs the shadow view"):
        distilling.step(dataclasses.replace(batch, traces=None))


def test_traces_stay_with_their_trajectories():
    model = tiny("llama")
    first, second = rollouts(model, lengths=(5, 5), new=20), rollouts(model, lengths=(30,), new=40)
    joined = join(*(score(model, collate(part), 64, view="shadow") for part in (first, second)))
    order = torch.tensor([5, 0, 3, 1])
    everyone = [*first, *second]
    (batch,) = batches_of(joined.rows(order), torch.ones(4), PRESETS["none"], Loss(), 1)
    for i, row in enumerate(order.tolist()):
        assert batch.traces[i] is everyone[row].trace
        assert batch.tokens[i, : batch.lengths[i]].tolist() == everyone[row].tokens.tolist()


def test_a_trace_that_does_not_belong_is_refused_before_any_update():
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    shorter = dataclasses.replace(done[0], trace=Trace(done[0].trace.evicted_at[:, :, :-1].clone()))
    other_model = dataclasses.replace(done[0], trace=Trace(done[0].trace.evicted_at[:-1].clone()))
    for wrong in (shorter, other_model):
        with pytest.raises(SparseRLError, match="belongs to another trajectory or another model"):
            score(model, collate([wrong, *done[1:]]), 64, view="shadow")
    damaged = done[0].trace.evicted_at.clone()
    damaged[1, 0, 7] = 7  # a query that does not see itself
    with pytest.raises(SparseRLError, match="it is damaged"):
        score(model, collate([dataclasses.replace(done[0], trace=Trace(damaged)), *done[1:]]), 64, view="shadow")


@pytest.mark.parametrize(
    "keys",
    [
        {"learn.method": "shadow"},
        {
            "learn.method": "smd",
            "learn.distill": "shadow-to-dense-forward",
            "learn.distill_weight": "0.5",
            "loss.beta": "0.01",
        },
    ],
)
def test_a_run_in_the_shadow_view_resumes_to_the_bit(keys, tmp_path):
    small = {
        "rollout.prompts": "4",
        "rollout.group_size": "4",
        "rollout.rows": "16",
        "eval.every": "0",
        "run.checkpoint_every": "1",
        **keys,
    }

    def run(folder, steps, resume=False):
        recipe = load_recipe("tiny-sums", [*small.items(), ("run.steps", str(steps))])
        return train(recipe, tmp_path / folder, resume, show=False)

    trainer = run("straight", 2)
    assert trainer.learner.distill_weight == float(keys.get("learn.distill_weight", 0.1))
    run("halved", 1)
    run("halved", 2, resume=True)
    lines = [(tmp_path / folder / "metrics.jsonl").read_text() for folder in ("straight", "halved")]
    assert lines[0] == lines[1]
    last = json.loads(lines[0].splitlines()[-1])
    assert abs(last["gap/abs/mean"]) < 1e-3 and last["gap/alpha/p05"] < 1  # nothing to correct, though the views differ
    first = json.loads(lines[0].splitlines()[0])
    assert abs(first.get("old/kl/mean", 0.0)) < 1e-6  # the reference is the model, seen in the same view
    assert ("update/distill/mean" in last) == (keys["learn.method"] == "smd")
    timing = json.loads((tmp_path / "straight" / "timing.jsonl").read_text().splitlines()[-1])
    assert timing["trace/bytes/total"] > 0


def test_methods_and_their_settings():
    small = {"model": {"name": "tiny"}, "task": {"name": "sums"}, "rollout": {"prompts": 4, "group_size": 4}}

    def learn(**keys):
        return make_recipe({**small, "learn": keys}).learn.resolve_method()

    assert learn(method="shadow") == METHODS["shadow"] and learn(method="smd").distill == "dense-to-shadow"
    reverse = learn(method="smd", distill="shadow-to-dense-reverse", distill_weight=0.3)
    assert reverse.distill == "shadow-to-dense-reverse" and reverse.distill_weight == 0.3
    assert learn(method="sparse-rl", view="shadow").view == "shadow"
    assert learn(method="shadow", correction={"cap": 2.0}).correction.cap == 2.0
    for wrong, message in (
        (dict(method="shaddow"), "shadow"),
        (dict(view="sparse"), "learn.view is 'sparse'"),
        (dict(method="smd", distill="d"), "must be one of dense-to-shadow, shadow-to-dense-forward, "),
        (dict(method="smd", distill="b"), "is now called shadow-to-dense-forward; write learn.distill: shadow-to-"),
        (dict(method="none", distill="dense-to-shadow"), "learn.view is dense, but distillation"),
        (dict(method="shadow", distill_weight=0.5), "does not distill"),
        (dict(method="naive", view="shadow"), "nothing to replay"),
        (dict(method="smd", distill_weight=-1.0), "distill_weight"),
    ):
        with pytest.raises(SparseRLError, match=message):
            learn(**wrong)
    assert method("tis").correction.cap == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traces_of_other_trajectories_are_refused_though_their_shapes_fit(dtype):
    """What a trace shows is the sampler's own view, so a trace that shows something else is found out before any
    update.
    """
    model = copy.deepcopy(tiny("llama")).to(dtype)
    done = [t for t in rollouts(model, new=60) if len(t.tokens) > 40]
    first, second = done[0], next(t for t in done[1:] if t.prompt_index != done[0].prompt_index)
    length = min(len(first.tokens), len(second.tokens))
    swapped = [cut(first, length, second.trace), cut(second, length, first.trace)]
    own = [cut(first, length, first.trace), cut(second, length, second.trace)]
    score(model, collate(own), 1000, view="shadow")
    with pytest.raises(
        SparseRLError,
        match=r"nats on average, but rounding in \w+ explains only .*sample the trajectories again",
    ):
        score(model, collate(swapped), 1000, view="shadow")
    with pytest.raises(SparseRLError, match="other weights or another temperature"):
        score(model, collate([first, second]), 1000, temperature=0.3, view="shadow")
    score(model, collate(swapped), 1000, view="dense")  # where traces are not looked at


def test_one_foreign_trace_among_many_and_many_short_ones_are_refused():
    """Neither hides behind the mean of the batch, nor behind what a short response is allowed."""
    mask = torch.zeros(32, 40, dtype=torch.bool)
    mask[:, 8:] = True
    gap = torch.full(mask.shape, 0.001) * mask
    check_replay(gap, mask, torch.float32)
    gap[5, 8:] = 0.1  # of 32 nats allowed in all
    with pytest.raises(SparseRLError, match=r"of 1 of 32 trajectories differ from the sampler's by up to 0.1 nats"):
        check_replay(gap, mask, torch.float32)
    short = mask & (torch.arange(40) < 16)
    with pytest.raises(SparseRLError, match=r"of 32 of 32 trajectories differ from the sampler's by up to 0.05 nats"):
        check_replay(torch.full(mask.shape, 0.05) * short, short, torch.float32)  # each below what 64 tokens may have
    check_replay(0.05 * short[:1], short[:1], torch.float32)  # a few odd tokens of one alone


def cut(t, length: int, trace: Trace):
    """The first tokens of a trajectory, with a trace that may be another's."""
    logprobs = t.sampler_logprobs[:length]
    return dataclasses.replace(t, tokens=t.tokens[:length], sampler_logprobs=logprobs, trace=trace.slice(0, length))


def test_the_plan_counts_traces():
    """Beside the dense learner: what was gone when, what each segment keeps, and fp32 gradients of one layer's keys and
    values.
    """
    plans = [
        plan_run(load_recipe("qwen2.5-1.5b-simplerl", [("learn.method", name)]), prompt_tokens=256)
        for name in ("none", "shadow")
    ]
    more = plans[1].update_bytes - plans[0].update_bytes
    tokens, layers, heads, dim = 16384, 28, 2, 128
    lists = 4 * tokens * layers * heads * (1 + 512 / 128)  # evicted_at, and 512 tokens kept every 128
    gradients = 2 * 4 * tokens * heads * dim
    assert lists + gradients < more < 3 * (lists + gradients)
    assert plans[1].total_bytes - plans[0].total_bytes in (0, more)
