"""The learner against plain torch: batches change nothing, micro-batches add up, masters are fp32, bad steps leave no
mark.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.errors import SparseRLError
from sparse_rl.learn import score as scoring
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import Batch, collate, join, score
from sparse_rl.learn.correct import PRESETS, Correction
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.packing import pack
from tests.helpers.largest import Largest
from tests.helpers.learning import batches_of
from tests.helpers.models import VOCABULARY, prompts_of, tiny

STEADY = OptimizerSettings(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def rollouts(model, lengths=(5, 9, 14), new=12, group=2, stop=7):
    engine = Engine(model, budget=12, interval=4, rows=6)
    return engine.generate(prompts_of(*lengths), group, Sampling(new, stop_ids=(stop,)))


def make_batch(model, preset="sparse-rl", loss=None, minibatches=1, temperature=1.0):
    done = rollouts(model)
    scored = score(model, collate(done), 64, temperature)
    rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
    advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
    return batches_of(scored, advantages, PRESETS[preset], loss or Loss(), minibatches), done, advantages


def test_batches_change_no_logprob(model):
    """Padded, packed and through the chunked head: what the model itself says of every sequence alone."""
    done = rollouts(model)
    sampled = collate(done)
    for limit in (1, 40, 10_000):
        scored = score(model, sampled, limit, temperature=0.8)
        for i, t in enumerate(done):
            with torch.no_grad():
                logits = model(t.tokens[None], use_cache=False).logits[0].float() / 0.8
            logprobs = logits.log_softmax(-1)[:-1]
            alone = logprobs.gather(1, t.tokens[1:, None])[:, 0][t.num_prompt_tokens - 1 :]
            spread = -(logprobs.exp() * logprobs).sum(-1)[t.num_prompt_tokens - 1 :]
            torch.testing.assert_close(scored.old_logprobs[i][sampled.mask[i]], alone, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(scored.entropies[i][sampled.mask[i]], spread, rtol=1e-4, atol=2e-5)
            likelier = (logprobs > logprobs.gather(1, t.tokens[1:, None])).sum(-1)[t.num_prompt_tokens - 1 :]
            off = (scored.ranks[i][sampled.mask[i]] - 1 - likelier).abs()
            assert off.max() <= 1 and (off == 0).float().mean() > 0.95  # two that are equally likely may change places
            assert (scored.ranks[i][~sampled.mask[i]] == 0).all()
            assert (scored.old_logprobs[i][~sampled.mask[i]] == 0).all() and (
                scored.gap[i][~sampled.mask[i]] == 0
            ).all()


def test_records_keep_what_was_sampled():
    done = rollouts(tiny("llama"))
    sampled = collate(done)
    for i, t in enumerate(done):
        assert sampled.tokens[i, : len(t.tokens)].equal(t.tokens) and sampled.lengths[i] == len(t.tokens)
        assert sampled.mask[i].nonzero()[:, 0].tolist() == list(range(t.num_prompt_tokens, len(t.tokens)))
        assert sampled.sampler_logprobs[i][sampled.mask[i]].equal(t.sampler_logprobs[t.num_prompt_tokens :])


def test_joining_keeps_rows():
    model = tiny("llama")
    first, second = (score(model, collate(rollouts(model, lengths)), 64) for lengths in ((5, 9), (20,)))
    both = join(first, second)
    n, width = first.sampled.tokens.shape
    assert both.sampled.tokens[:n, :width].equal(first.sampled.tokens) and not both.sampled.mask[:n, width:].any()
    assert (
        both.rows(torch.tensor([n, n + 1])).old_logprobs[:, : second.old_logprobs.shape[1]].equal(second.old_logprobs)
    )
    assert both.reference_logprobs is None


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000))
def test_pack_takes_every_row_once_within_the_limit(lengths, limit):
    packed = pack(torch.tensor(lengths), limit)
    assert sorted(i for rows in packed for i in rows.tolist()) == list(range(len(lengths)))
    for rows in packed:
        longest = max(lengths[i] for i in rows.tolist())
        assert len(rows) == 1 or len(rows) * longest <= limit


def test_logits_exist_for_a_chunk_only(monkeypatch):
    """Forward and backward of a step: nothing over the vocabulary, in any dtype, has more rows than a chunk."""
    model = copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(model)
    monkeypatch.setattr(scoring, "head_chunk", lambda vocabulary: 8)
    with Largest() as seen:
        metrics = Learner(model, STEADY, Loss()).step(batch).metrics
    assert metrics["update/grad_norm"] > 0 and int(batch.mask.sum()) > 30
    assert seen.rows == 8


def reference_step(model, batch: Batch, loss: Loss, temperature: float) -> torch.nn.Module:
    """One AdamW step on the loss of the whole batch at once, with logits of one sequence after another."""
    model = copy.deepcopy(model)
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    adamw = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    total = 0.0
    for i in range(len(batch.tokens)):
        tokens = batch.tokens[i, : batch.lengths[i]]
        logprobs = (model(tokens[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs = logprobs.gather(1, tokens[1:, None])[:, 0]
        for t in range(1, len(tokens)):
            if batch.mask[i, t]:
                r = (logprobs[t - 1] - batch.old_logprobs[i, t]).exp()
                gain = torch.minimum(
                    r * batch.advantages[i], r.clamp(1 - loss.clip_low, 1 + loss.clip_high) * batch.advantages[i]
                )
                total = total - batch.scale[i, t] * batch.weights[i, t] * gain
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    return model


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("limit", [1, 50, 10_000])
def test_a_step_is_adamw_on_the_whole_batch(architecture, limit):
    model = copy.deepcopy(tiny(architecture))
    (batch,), _, _ = make_batch(model, temperature=0.9)
    expected = reference_step(model, batch, Loss(), 0.9)
    metrics = Learner(model, STEADY, Loss(), micro_batch_tokens=limit, temperature=0.9).step(batch).metrics
    assert metrics["update/grad_norm"] > 1e-3
    for got, want, start in zip(model.parameters(), expected.parameters(), tiny(architecture).parameters()):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-5)
        assert not torch.equal(got, start)


def test_naive_is_centred_on_the_sampler():
    done = rollouts(tiny("llama"))
    scored = score(tiny("llama"), collate(done), 64)
    naive, none = (batches_of(scored, torch.ones(6), PRESETS[name], Loss(), 1)[0] for name in ("naive", "none"))
    assert naive.old_logprobs.equal(scored.sampled.sampler_logprobs) and none.old_logprobs.equal(scored.old_logprobs)
    assert (scored.gap.abs() > 0.01).any() and naive.weights[naive.mask].eq(1).all()


def test_clip_fraction_counts_all_response_tokens():
    model = copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(model, "none")
    dropped = batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0)
    batch.mask[dropped] = False
    batch.old_logprobs[batch.mask] -= 1.0  # every ratio is e: clipped where the advantage is positive
    clipped = int(batch.mask[batch.advantages > 0].sum())
    result = Learner(model, STEADY, Loss()).step(batch)
    metrics = result.metrics
    assert metrics["update/clip/frac"] == clipped / batch.response_tokens < clipped / int(batch.mask.sum())
    assert result.clipped.equal(batch.mask & (batch.advantages > 0)[:, None])


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_no_dropout_of_any_kind_while_learning(architecture):
    import transformers

    if architecture == "gpt2":
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    else:
        model = copy.deepcopy(tiny("llama", attention_dropout=0.5))
    (batch,), _, _ = make_batch(model, "none")
    before = {n: (m.training, getattr(m, "p", None)) for n, m in model.named_modules()}
    metrics = Learner(model, STEADY, Loss()).step(batch).metrics
    assert abs(metrics["update/drift/mean"]) < 1e-6
    assert before == {n: (m.training, getattr(m, "p", None)) for n, m in model.named_modules()}


def test_models_whose_decoder_cannot_be_caught_are_refused(monkeypatch):
    model = copy.deepcopy(tiny("llama"))
    calls = type(model.model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **inputs: calls(self.model, **inputs))  # round its hooks
    with pytest.raises(SparseRLError, match="does not run its decoder as a whole"):
        token_logprobs(model, torch.arange(9))


def test_a_decoder_inside_the_decoder_is_caught():
    """OPT's causal LM calls the decoder of its model, not the model."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    model, tokens = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.arange(9)
    expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert (token_logprobs(model, tokens)[1:] - expected).abs().max() < 1e-5


def test_checkpointing_changes_no_gradient():
    plain, saving = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(plain)
    saving.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    saving.model.layers[0].mlp.register_forward_pre_hook(count)
    one, two = (Learner(m, STEADY, Loss(), micro_batch_tokens=10_000).step(batch).metrics for m in (plain, saving))
    assert runs == 2  # recomputed: it was on
    assert one == pytest.approx(two, rel=1e-5)
    for a, b in zip(plain.parameters(), saving.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_ratio_starts_at_one_despite_dropout():
    model = copy.deepcopy(tiny("llama", attention_dropout=0.5))
    (batch,), _, _ = make_batch(model, "none")
    metrics = Learner(model, STEADY, Loss()).step(batch).metrics
    assert abs(metrics["update/drift/mean"]) < 1e-6 and metrics["update/clip/frac"] == 0
    assert model.model.layers[0].self_attn.attention_dropout == 0.5 and not model.training


def test_the_reference_is_another_model():
    from contextlib import nullcontext

    model, other = copy.deepcopy(tiny("llama")), tiny("llama", rms_norm_eps=0.1)
    done = rollouts(model)
    scored = score(model, collate(done), 64, 0.9, nullcontext(other))
    for i, t in enumerate(done):
        with torch.no_grad():
            expected = token_logprobs(other, t.tokens, temperature=0.9)[t.num_prompt_tokens :]
        torch.testing.assert_close(scored.reference_logprobs[i][scored.sampled.mask[i]], expected, rtol=1e-4, atol=1e-5)
    advantages = torch.zeros(len(done))
    (batch,) = batches_of(scored, advantages, PRESETS["none"], Loss(beta=0.1), 1)
    # No advantage anywhere: the KL alone moves the weights.
    metrics = Learner(model, STEADY, Loss(beta=0.1), temperature=0.9).step(batch).metrics
    assert metrics["update/kl/mean"] > 0 and metrics["update/loss"] == pytest.approx(
        0.1 * mean_of_sequences(scored), rel=1e-4
    )
    without = Learner(copy.deepcopy(model), STEADY, Loss()).step(batch).metrics
    assert without == {"update/empty/count": 1.0}


def mean_of_sequences(scored) -> float:
    d = scored.reference_logprobs - scored.old_logprobs
    k3 = torch.where(scored.sampled.mask, d.exp() - 1 - d, 0.0)
    return (k3.sum(1) / scored.sampled.mask.sum(1)).mean().item()


def test_optimizer_steps_have_their_own_normalisation():
    """The released code's weights have mean 1 over the response tokens of each optimizer step, and scales count its
    trajectories only.
    """
    model = tiny("llama")
    done = rollouts(model)
    scored = score(model, collate(done), 64)
    batches = batches_of(scored, torch.ones(6), PRESETS["sparse-rl-released"], Loss(), 3)
    for i, batch in enumerate(batches):
        mask = scored.sampled.mask[2 * i : 2 * i + 2]
        assert batch.tokens.equal(scored.sampled.tokens[2 * i : 2 * i + 2]) and batch.response_tokens == int(mask.sum())
        assert batch.weights[mask].mean().item() == pytest.approx(1.0, rel=1e-5)
        for row in range(2):
            kept = int(batch.mask[row].sum())
            assert batch.scale[row].sum().item() == pytest.approx(0.5 if kept else 0.0)


def test_bf16_weights_move_through_their_fp32_masters():
    model = copy.deepcopy(tiny("llama")).bfloat16()
    optimizer = MasterAdamW(model.parameters(), OptimizerSettings(lr=1e-6, betas=(0.0, 0.0), weight_decay=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        for p in model.parameters():
            torch.autograd.backward(p.float().sum())
        assert all(p.grad is None for p in model.parameters())  # gathered in fp32 already
        optimizer.step(0)
    still = sum(int((a == b).sum()) for a, b in zip(before, model.parameters()))
    assert still > 0.98 * sum(p.numel() for p in before)  # bf16 alone would never get anywhere
    for a, master in zip(before, optimizer.masters):
        torch.testing.assert_close(master, a.float() - 3e-6, rtol=0, atol=1e-8 + 1e-6 * a.float().abs().max().item())
    for _ in range(3000):
        for master in optimizer.masters:
            master.grad = torch.ones_like(master)
        optimizer.step(0)
    for a, p, master in zip(before, model.parameters(), optimizer.masters):
        assert p.equal(master.bfloat16()) and not p.equal(a)


def test_gradients_of_micro_batches_add_up_in_fp32():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], OptimizerSettings(lr=0.5, max_grad_norm=1e9))
    for _ in range(300):
        (weight * torch.tensor([1.0, 0.25, 3.0, 1 / 64], dtype=torch.bfloat16)).sum().backward()
    assert optimizer.masters[0].grad.tolist() == [300.0, 75.0, 900.0, 300 / 64]  # bf16 sums would stop at 256


def test_the_state_of_other_adapters_is_refused_before_anything_is_read():
    few, many = (MasterAdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(n)], STEADY) for n in (2, 3))
    with pytest.raises(SparseRLError, match="the optimizer's state is of 2 tensors, but this run trains 3"):
        many.load_state_dict(few.state_dict())
    assert all(master.tolist() == [1.0, 1.0] for master in many.masters)


def test_optimizer_state_comes_back():
    model = copy.deepcopy(tiny("llama")).bfloat16()
    (batch,), _, _ = make_batch(model)
    learner = Learner(model, STEADY, Loss())
    learner.step(batch)
    twin = Learner(copy.deepcopy(tiny("llama")).bfloat16(), STEADY, Loss())
    twin.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert twin.version == 1
    assert learner.step(batch).metrics == twin.step(batch).metrics
    assert all(a.equal(b) for a, b in zip(learner.optimizer.masters, twin.optimizer.masters))
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.model.parameters()))


def unchanged(model, step):
    before = [p.detach().clone() for p in model.parameters()]
    result = step()
    assert all(a.equal(b) for a, b in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    return result


def test_everything_rejected_leaves_no_mark():
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    scored = score(model, collate(done), 64)
    reject_all = Correction(reject_below=1e9)
    (batch,) = batches_of(scored, torch.ones(len(done)), reject_all, Loss(renormalise=True), 1)
    learner = Learner(model, STEADY, Loss())
    assert unchanged(model, lambda: learner.step(batch).metrics) == {"update/empty/count": 1.0}
    assert learner.version == 0


def test_rejected_and_flat_trajectories_do_not_go_through_the_model():
    model = copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(model, "none")
    batch.advantages[:4] = 0
    rows = []
    model.register_forward_hook(lambda m, a, k, o: rows.append(k["input_ids"].shape[0]), with_kwargs=True)
    Learner(model, STEADY, Loss()).step(batch)
    assert rows[0] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_skipped_counted_and_finally_stops(value):
    model = copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(model, "none")
    good = copy.deepcopy(batch)
    batch.weights[batch.mask] = value
    learner = Learner(model, STEADY, Loss(), max_skipped=3)
    assert unchanged(model, lambda: learner.step(batch).metrics) == {"update/skipped/count": 1.0}
    unchanged(model, lambda: learner.step(batch))
    assert "update/loss" in learner.step(good).metrics and learner.skipped == 0  # a good step forgives
    for _ in range(2):
        learner.step(batch)
    with pytest.raises(
        SparseRLError, match=r"3 optimizer steps in a row .* not finite; the weights are those of optimizer step 1"
    ):
        unchanged(model, lambda: learner.step(batch))


def test_a_gradient_that_is_not_finite_is_skipped_too():
    model = copy.deepcopy(tiny("llama"))
    (batch,), _, _ = make_batch(model, "none")
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * math.nan)
    learner = Learner(model, STEADY, Loss())
    assert unchanged(model, lambda: learner.step(batch).metrics) == {"update/skipped/count": 1.0}


def test_float16_is_refused_where_no_loss_is_scaled():
    with pytest.raises(SparseRLError, match="the model is float16, in which gradients vanish"):
        MasterAdamW(copy.deepcopy(tiny("llama")).half().parameters(), STEADY)


def test_lora_trains_adapters_alone():
    pytest.importorskip("peft")
    from sparse_rl.models import with_lora

    model = with_lora(copy.deepcopy(tiny("llama")), rank=4, alpha=8)
    (batch,), _, _ = make_batch(model, "none")
    learner = Learner(model, STEADY, Loss())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.step(batch)
    moved = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    assert moved and all("lora_" in n for n in moved)
    assert len(learner.optimizer.parameters) == sum("lora_" in n for n in before)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_positive_advantage_raises_the_log_prob(seed):
    """The sign of everything, end to end: a tiny step raises what was rewarded and lowers what was not."""
    model = copy.deepcopy(tiny("llama"))
    tokens = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 4:] = True
    ones = torch.ones(2, 9)
    batch = Batch(
        tokens,
        torch.tensor([9, 9]),
        mask,
        torch.zeros(2, 9),
        None,
        torch.tensor([1.0, -1.0]),
        ones,
        mask / 10,
        10,
        torch.zeros(2, dtype=torch.int64),
    )

    def logprobs():
        with torch.no_grad():
            return torch.stack([token_logprobs(model, row)[4:].sum() for row in tokens])

    before = logprobs()
    batch = Batch(
        **{**vars(batch), "old_logprobs": torch.stack([token_logprobs(model, row).detach() for row in tokens])}
    )
    Learner(model, OptimizerSettings(lr=1e-5, weight_decay=0.0), Loss()).step(batch)
    change = logprobs() - before
    assert change[0] - change[1] > 0
