"""Every way in which the learner computes a step, against one that is written out here: row by row, with a full softmax
under an explicit mask, and AdamW by hand. Loss, every parameter's gradient and the next weights, in fp64, over ragged
batches that hypothesis draws.

All ways run in fp64, the fused head included: without a GPU its twin computes what its kernels do, and the kernels,
which know fp32 and half precisions only, are compared with the twin elsewhere (tests/kernels/test_kernels_learner.py).
transformers rounds norms to fp32; here they keep fp64. Nothing of the learner is compiled on a CPU.
"""

import copy
import importlib
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparse_rl.cache import Trace
from sparse_rl.learn import long as long_module
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import Batch, Scored, collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.head import plain_head
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.long import use_long_rows
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.models import set_logits
from sparse_rl.records import Trajectory
from tests.helpers.decoding import change_rules
from tests.helpers.learning import batches_of

LAYERS, HEADS, GROUPS, DIM, WINDOW, VOCABULARY = 2, 2, 2, 4, 6, 29
FAMILIES = {  # what their attentions have beside Llama's
    "Llama": {},
    "Qwen2": {},  # biases
    "Qwen3": {"tie_word_embeddings": True},  # norms of queries and keys
    "Mistral": {"sliding_window": WINDOW},
}
WAYS = {  # parts of the learner that are switched on
    "padded": set(),
    "packed": {"packed"},
    "fused": {"fused"},
    "all at once": {"packed", "fused", "checkpointed"},
    "long rows": {"packed", "long", "checkpointed"},
}
SMALLEST = 1e-10  # difference that matters, of numbers of size 1


# ------------------------------------------------------------------------------------------- what hypothesis draws


@dataclass(frozen=True)
class Drawn:
    rows: list[Trajectory]
    advantages: torch.Tensor
    loss: Loss
    optimizer: OptimizerSettings
    temperature: float
    micro_batch_tokens: int
    correction: str
    seed: int


@st.composite
def ragged(draw) -> Drawn:
    """Groups of completions: prompts of a token or more, answers of none or more, of which some, all or no tokens
    count; members of a group whose prompt was evicted alike or otherwise.
    """
    rows, number = [], torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tokens(count):
        return torch.randint(0, VOCABULARY, (count,), generator=number)

    def evictions(count, often):
        """Moments after each of `count` tokens at which heads lose it; for many tokens none."""
        after = torch.arange(count) + torch.randint(1, 9, (LAYERS, HEADS, count), generator=number)
        return torch.where(torch.rand(after.shape, generator=number) < often, after, 65535)

    for group in range(draw(st.integers(1, 3))):
        prompt, often = tokens(draw(st.sampled_from([9, 14, 5, 2, 1]))), draw(st.sampled_from([0.0, 0.3, 0.9]))
        start, first = evictions(len(prompt), often), len(prompt)
        for member in range(draw(st.sampled_from([3, 2, 1]))):
            answer, counting = (
                tokens(draw(st.integers(0, 9))),
                draw(st.sampled_from(["all", "all", "all", "some", "none"])),
            )
            alike = draw(st.sampled_from([True, True, False]))
            before = start if alike else evictions(first, often)
            late = evictions(first, often)  # what is lost while the answer is written differs anyway
            before = torch.where(before < first, before, torch.where(late < first, 65535, late))
            evicted_at = torch.cat([before, first + evictions(len(answer), often)], -1).clamp(max=65535)
            whole = torch.cat([prompt, answer])
            given = torch.rand(len(whole), generator=number) < {"all": 0.0, "some": 0.4, "none": 1.0}[counting]
            given &= torch.arange(len(whole)) >= first
            trace = Trace(evicted_at.to(torch.uint16))
            logprobs = torch.zeros(len(whole))
            rows.append(Trajectory(whole, first, logprobs, trace, "length", group, member, given=given))
    advantages = draw(st.lists(st.sampled_from([-1.5, -0.4, 0.0, 0.7, 2.0]), min_size=len(rows), max_size=len(rows)))
    return Drawn(
        rows,
        torch.tensor(advantages),
        Loss(
            beta=draw(st.sampled_from([0.0, 0.3])),
            clip=draw(st.sampled_from(["ratio", "weight"])),
            level=draw(st.sampled_from(["token", "sequence"])),
            mean=draw(st.sampled_from(["sequence-mean", "token-mean", "dr-grpo"])),
            constant=7,
        ),
        OptimizerSettings(lr=0.01, eps=1e-3, max_grad_norm=draw(st.sampled_from([0.05, 1e3]))),
        draw(st.sampled_from([1.0, 0.7])),
        draw(st.one_of(st.integers(1, 40), st.integers(40, 200))),
        draw(st.sampled_from(["none", "tis", "mis"])),
        draw(st.integers(0, 1000)),
    )


# ---------------------------------------------------------------------------------------------- the step, written out


def logprobs_by_hand(weights, config, row: Trajectory, shadow: bool, temperature: float) -> torch.Tensor:
    """Log-probs of the tokens of one row after its first. fp64 [T - 1]"""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def linear(x, name):
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turned(x):  # [heads, T, DIM]
        first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    count = len(row.tokens)
    index = torch.arange(count)
    frequency = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, DIM, 2).float() / DIM)
    angles = index[:, None].float() * frequency  # transformers has angles, cosines and sines in fp32
    cos, sin = angles.cos().double(), angles.sin().double()
    distance = index[:, None] - index
    x = weights["model.embed_tokens.weight"][row.tokens]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm.weight")
        query, key, value = (
            linear(y, f"{name}.self_attn.{part}_proj").view(count, -1, DIM).transpose(0, 1) for part in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in weights:
            query = norm(query, f"{name}.self_attn.q_norm.weight")
            key = norm(key, f"{name}.self_attn.k_norm.weight")
        query, key = turned(query), turned(key)
        out = []
        for head in range(HEADS * GROUPS):
            seen = distance >= 0
            if shadow:
                seen = seen & (index[:, None] < row.trace.evicted_at[layer, head // GROUPS].long())
            if config.model_type == "mistral":
                seen = seen & (distance < WINDOW)
            logits = query[head] @ key[head // GROUPS].T / DIM**0.5
            out.append(torch.where(seen, logits, -torch.inf).softmax(-1) @ value[head // GROUPS])
        x = x + linear(torch.cat(out, -1), f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm.weight")
        gate, up = linear(y, f"{name}.mlp.gate_proj"), linear(y, f"{name}.mlp.up_proj")
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = norm(x, "model.norm.weight") @ head.T / temperature
    return logits[:-1].log_softmax(-1).gather(1, row.tokens[1:, None])[:, 0]


def step_by_hand(weights, config, drawn: Drawn, batch: Batch, shadow: bool):
    """(loss, gradients, gradient norm, next weights) of one optimizer step."""
    loss, total = drawn.loss, torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(drawn.rows):
        found = logprobs_by_hand(weights, config, row, shadow, drawn.temperature)
        counting = [t for t in range(len(row.tokens)) if batch.mask[i, t]]
        drifts = [found[t - 1] - batch.old_logprobs[i, t].item() for t in counting]
        for t, drift in zip(counting, drifts, strict=True):
            r = (sum(drifts) / len(drifts) if loss.level == "sequence" else drift).exp()
            gain, clipped = drawn.advantages[i].item(), r.clamp(0.8, 1.2)
            if loss.clip == "weight":
                surrogate = -clipped.detach() * gain * found[t - 1]
            else:
                surrogate = -torch.minimum(r * gain, clipped * gain)
            term = batch.weights[i, t].item() * surrogate
            if loss.beta:
                assert batch.reference_logprobs is not None
                further = batch.reference_logprobs[i, t].item() - found[t - 1]
                term = term + loss.beta * (further.exp() - 1 - further)
            total = total + batch.scale[i, t].item() * term
    names = list(weights)
    gradients = [torch.zeros_like(weights[name]) for name in names]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True, materialize_grads=True)
    norm = sum(g.square().sum() for g in gradients) ** 0.5
    shrink, o, after = min(1.0, drawn.optimizer.max_grad_norm / (float(norm) + 1e-6)), drawn.optimizer, {}
    for name, gradient in zip(names, gradients, strict=True):
        g, w = gradient * shrink, weights[name].detach()
        decay = o.weight_decay if w.dim() > 1 else 0.0
        after[name] = w * (1 - o.lr * decay) - o.lr * g / (g.abs() + o.eps)  # the first step of AdamW
    return total.item(), dict(zip(names, gradients, strict=True)), float(norm), after


def scale_by_hand(mask: torch.Tensor, loss: Loss) -> torch.Tensor:
    rows, tokens = len(mask), mask.sum().item()
    scale = torch.zeros(mask.shape, dtype=torch.float64)
    for row, own in zip(scale, mask, strict=True):
        count = own.sum().item()
        if count:
            means = {"sequence-mean": 1 / (rows * count), "token-mean": 1 / tokens, "dr-grpo": 1 / (rows * 7)}
            row[own] = means[loss.mean]
    return scale


# --------------------------------------------------------------------------------------------------- and the learner's


def made(family: str):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, head_dim=DIM,
        num_attention_heads=HEADS * GROUPS, num_key_value_heads=HEADS, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, **{"tie_word_embeddings": False, **FAMILIES[family]},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms start out constant
                parameter.add_(0.1 * torch.randn_like(parameter))
    return set_logits(model)


@contextmanager
def computed(family: str, parts: set[str], shared: set[bool]):
    """Switch parts of the learner on, with heads and MLPs in small chunks; `shared` learns which rows were packed."""
    modeling = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    pack_rows = packing_module.pack_rows

    def noted(*given, **named):
        packing = pack_rows(*given, **named)
        shared.add(bool(packing.first.any()))
        return packing

    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(modeling, f"{family}RMSNorm"), "forward", norm)
        patch.setattr(packing_module, "WORTH_PACKING", 2.0)
        patch.setattr(packing_module, "WORTH_SHARING", 2)
        patch.setattr(packing_module, "pack_rows", noted)
        patch.setattr(scoring, "head_chunk", lambda vocabulary: 3)
        patch.setattr(long_module, "MLP_CHUNK", 4)
        if "fused" in parts:
            change_rules(patch, fuses_learning=True)
        yield


def all_by_hand(model, drawn: Drawn, shadow: bool) -> torch.Tensor:
    """Log-probs of the tokens of all rows, where they count. fp64 [N, T]"""
    sampled = collate(drawn.rows)
    found = torch.zeros(sampled.tokens.shape, dtype=torch.float64)
    with torch.no_grad():
        for i, row in enumerate(drawn.rows):
            own = logprobs_by_hand(dict(model.named_parameters()), model.config, row, shadow, drawn.temperature)
            found[i, 1 : len(row.tokens)] = own
    return torch.where(sampled.mask, found, 0.0)


def batch_of(model, drawn: Drawn, shadow: bool) -> Batch:
    """The batch of a step whose log-probs moved since it was sampled, so that some tokens are clipped."""
    sampled, number = collate(drawn.rows), torch.Generator().manual_seed(drawn.seed)
    old = all_by_hand(model, drawn, shadow).float()
    old += 0.3 * torch.randn(old.shape, generator=number)
    reference = old + 0.3 * torch.randn(old.shape, generator=number)
    sampled = replace(sampled, sampler_logprobs=old + 0.3 * torch.randn(old.shape, generator=number))
    nothing = torch.zeros_like(old)
    scored = Scored(sampled, old, nothing, nothing, reference, view="shadow" if shadow else "dense")
    (batch,) = batches_of(scored, drawn.advantages, PRESETS[drawn.correction], drawn.loss)
    return batch


def close(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    assert ours.dtype == torch.float64 and ours.shape == theirs.shape, name
    off = (ours - theirs).abs().max().item()
    assert off <= SMALLEST * max(1.0, theirs.abs().max().item()), f"{name}: {off}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_every_way_takes_the_step_that_is_written_out(family, view):
    model, shadow, seen = made(family), view == "shadow", {way: set() for way in WAYS}
    moved, stayed = [], []

    @given(ragged())
    @settings(max_examples=30)
    def steps(drawn):
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        batch = batch_of(model, drawn, shadow)
        torch.testing.assert_close(batch.scale.double(), scale_by_hand(batch.mask, drawn.loss), rtol=1e-6, atol=0)
        loss, gradients, norm, after = step_by_hand(weights, model.config, drawn, batch, shadow)
        active = bool(drawn.loss.active(batch).any())
        (moved if active else stayed).append(drawn)
        for way, parts in WAYS.items():
            ours = copy.deepcopy(model)
            if "checkpointed" in parts:
                ours.gradient_checkpointing_enable()
            if "long" in parts:
                use_long_rows(ours)
            with computed(family, parts, seen[way]):
                assert (plain_head(ours) is not None) == ("fused" in parts)
                learner = Learner(
                    ours, drawn.optimizer, drawn.loss, micro_batch_tokens=drawn.micro_batch_tokens,
                    packing="packed" in parts, temperature=drawn.temperature,
                )  # fmt: skip
                found, take = [], learner.optimizer.step

                def take_and_note(*given, learner=learner, found=found, take=take):
                    found.extend(g.clone() for g in learner.optimizer.gradients())
                    return take(*given)

                learner.optimizer.step = take_and_note
                metrics = learner.step(batch).metrics
            if not active:
                assert metrics == {"update/empty/count": 1.0} and not found
                assert all(p.equal(weights[name]) for name, p in ours.named_parameters())
                continue
            assert metrics["update/loss"] == pytest.approx(loss, rel=SMALLEST, abs=SMALLEST), way
            assert metrics["update/grad_norm"] == pytest.approx(norm, rel=SMALLEST, abs=SMALLEST), way
            for (name, p), g in zip(ours.named_parameters(), found, strict=True):
                close(g, gradients[name], f"{way}: gradient of {name}")
                close(p.detach(), after[name], f"{way}: {name}")

    steps()
    assert moved
    for way, parts in WAYS.items():  # what was drawn reaches what is tested
        shares = "packed" in parts and family != "Mistral"  # kernels measure windows in the packed row
        assert (True in seen[way]) == shares and (False in seen[way]) >= ("packed" in parts), way


@pytest.mark.parametrize("view", ["dense", "shadow"])
@given(drawn=ragged(), way=st.sampled_from(["padded", "packed", "fused", "all at once"]))
@settings(max_examples=30)
def test_scoring_finds_the_logprobs_that_are_written_out(view, drawn, way):
    """Up to the rounding of fp32, in which they are kept."""
    model, parts, sampled = made("Llama"), WAYS[way], collate(drawn.rows)
    expected = all_by_hand(model, drawn, view == "shadow").float()
    sampled = replace(sampled, sampler_logprobs=expected)  # which scoring under replay compares with its own
    with computed("Llama", parts, set()):
        found = score(model, sampled, drawn.micro_batch_tokens, drawn.temperature, view=view, packing="packed" in parts)
    torch.testing.assert_close(found.old_logprobs, expected, rtol=1e-6, atol=1e-6)
    assert found.old_logprobs.dtype == torch.float32 and ((found.ranks > 0) == sampled.mask).all()
