"""The learner's kernels on a CUDA device in bf16: as close to fp32 as the modules they stand for, and close to those.

The noise floor is what bf16 itself changes: modules in bf16 against the same weights in fp32.
"""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.kernels import ops
from sparse_rl.kernels.modules import fused
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.head import PlainHead, plain_head
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.score import batch_logprobs, replay_of
from sparse_rl.models import set_logits
from tests.helpers.checkpointing import checkpoint
from tests.helpers.decoding import change_rules
from tests.helpers.gpu import SMALL, on_gpu
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu


def rollouts(model):
    engine = Engine(model, "rkv", budget=24, interval=8, rows=8)
    return engine.generate(prompts_of(9, 30, 100), 2, Sampling(90, stop_ids=()), seed=1)


def found_by(model, done, view):
    sampled = collate(done)
    replay = replay_of(model, [(t.tokens, t.trace) for t in done]) if view == "shadow" else None
    model.zero_grad()
    upstream = torch.randn(sampled.tokens.shape, generator=torch.Generator().manual_seed(0)).cuda()
    with fused(model):
        logprobs = batch_logprobs(model, sampled.tokens.cuda(), sampled.mask.cuda(), 0.9, replay)
        (logprobs * upstream).sum().backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach().double().cpu(), gradients


def distance(a, b) -> tuple[float, float]:
    """Of log-probs, in nats per token; of all gradients, relative."""
    off = sum((a[1][name] - b[1][name]).norm() ** 2 for name in b[1]) ** 0.5
    return (a[0] - b[0]).abs().mean().item(), (off / sum(g.norm() ** 2 for g in b[1].values()) ** 0.5).item()


@pytest.mark.parametrize("view", ["dense", "shadow"])
@pytest.mark.parametrize(
    "name, case",
    [("llama", ""), ("qwen2", "checkpointing"), ("llama", "selective"), ("qwen3", "lora"), ("mistral", "")],
)
def test_log_probs_and_gradients_at_the_noise_floor(name, case, view, monkeypatch):
    changes = SMALL | ({"sliding_window": None} if name == "mistral" else {})
    model = set_logits(on_gpu(name, torch.bfloat16, **changes, vocab_size=5000, tie_word_embeddings=case == "lora"))
    done = rollouts(model)
    if case == "lora":
        pytest.importorskip("peft")
        from sparse_rl.models import with_lora

        torch.manual_seed(0)
        model = with_lora(model, rank=4, alpha=8).to(torch.bfloat16)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.normal_(std=0.02)
    exact = copy.deepcopy(model).float()
    if case in ("checkpointing", "selective"):
        checkpoint(model, case == "checkpointing" or case)
    used = _count(monkeypatch)
    ours = found_by(model, done, view)
    assert used == {"add_and_norm", "silu_gate", "rotate", "token_statistics", "logit_gradients"}
    with monkeypatch.context() as patch:
        change_rules(patch, fuses_learning=False)
        theirs, fine = found_by(model, done, view), found_by(exact, done, view)
    assert ours[1].keys() == theirs[1].keys()
    floor, mine, apart = distance(theirs, fine), distance(ours, fine), distance(ours, theirs)
    for i in range(2):
        assert mine[i] < 1.15 * floor[i] and apart[i] < 1.5 * floor[i], (floor, mine, apart)


def _count(monkeypatch) -> set[str]:
    """The operations that ran by kernels of the learner."""
    used, module_for = set(), ops.module_for

    def counted(operation, *given):
        module = module_for(operation, *given)
        if module in ("layers", "head"):
            used.add(operation)
        return module

    monkeypatch.setattr(ops, "module_for", counted)
    return used


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_in_fp32_it_is_the_modules(view, monkeypatch):
    model = on_gpu("qwen3", torch.float32, **SMALL)
    done = rollouts(model)
    ours = found_by(model, done, view)
    change_rules(monkeypatch, fuses_learning=False)
    logprobs, gradients = distance(ours, found_by(model, done, view))
    assert logprobs < 1e-5 and gradients < 1e-4


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(
    "tokens, hidden, vocabulary, chunk", [(1, 64, 151936, 1024), (300, 576, 49152, 128), (0, 64, 99, 8)]
)
def test_the_head(tokens, hidden, vocabulary, chunk, softcap):
    """Log-probs, entropies and ranks against fp64 of the same bf16 weights; gradients at bf16's rounding."""
    torch.manual_seed(0)
    weight = (0.05 * torch.randn(vocabulary, hidden, device="cuda")).bfloat16().requires_grad_()
    states = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    up = torch.randn(tokens, device="cuda")
    logprobs, entropies, ranks = PlainHead(weight, softcap).statistics(states, targets, 0.8, chunk)
    found = torch.autograd.grad((logprobs * up).sum(), (states, weight))
    exact = [x.detach().double().requires_grad_() for x in (states, weight)]
    z = exact[0] @ exact[1].t()
    z = (z if softcap is None else torch.tanh(z / softcap) * softcap) / 0.8
    spread = z.log_softmax(-1)
    chosen = spread.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), chosen.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.double(), -(spread.exp() * spread).sum(-1).detach(), rtol=1e-4, atol=1e-4)
    assert ((ranks - 1 - (spread > chosen[:, None]).sum(-1)).abs() <= 2).all()
    for a, b in zip(found, torch.autograd.grad((chosen * up.double()).sum(), exact), strict=True):
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() <= 0.01 * b.norm()


def test_a_step_of_the_learner_in_bf16(monkeypatch):
    """Scored and updated with and without: old log-probs, gradient norms and masters agree within bf16's noise."""
    from sparse_rl.learn.correct import PRESETS
    from tests.helpers.learning import batches_of

    found = []
    for fuses in (True, False):
        with monkeypatch.context() as patch:
            change_rules(patch, fuses_learning=fuses)
            model = set_logits(on_gpu("qwen2", torch.bfloat16, **SMALL))
            done = rollouts(model) if not found else found[0][0]
            scored = score(model, collate(done), 512, view="shadow")
            advantages = torch.tensor([1.0, -1.0] * (len(done) // 2))
            (batch,) = batches_of(scored, advantages, PRESETS["none"], Loss())
            learner = Learner(model, OptimizerSettings(lr=1e-5), Loss(), micro_batch_tokens=512)
            assert (plain_head(model) is not None) == fuses
            metrics = learner.step(batch).metrics
            found.append((done, scored, metrics, torch.cat([m.detach().flatten() for m in learner.optimizer.masters])))
    (_, ours, mine, masters), (_, theirs, other, others) = found
    assert (ours.old_logprobs - theirs.old_logprobs).abs().mean() < 0.02
    assert (ours.entropies - theirs.entropies).abs().mean() < 0.02
    assert mine["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=0.05)
    assert ((masters - others).abs() > 1e-5).float().mean() < 0.1  # AdamW's first step is lr times a sign
