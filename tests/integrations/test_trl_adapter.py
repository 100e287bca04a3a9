"""Sparse rollouts inside TRL's GRPOTrainer: it samples, scores and learns as our own engine and learner do."""

import ast
import contextlib
import copy
import dataclasses
import itertools
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels import ops
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS, Correction
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.models import tiny_tokenizer
from tests.helpers.learning import batches_of
from tests.helpers.models import tiny

trl = pytest.importorskip("trl", minversion="1.12")
datasets = pytest.importorskip("datasets")

from sparse_rl.integrations.trl import TRACES, rollout_seed, use_sparse_rollouts  # noqa: E402

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "trl_grpo.py"
PROMPTS = ["3+4=", "sum of 12 and 7", "x", "17 times 4 is"]
GENERATIONS = 3
ROWS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(GENERATIONS)]
NEW = 40  # of which a row holds 14 to 18
CACHE = dict(compressor="rkv", budget=14, interval=4)
LOSSES = {
    "grpo": Loss(),
    "dapo": Loss(mean="token-mean"),
    "dr_grpo": Loss(mean="dr-grpo", constant=NEW),
}
STRICT = Correction(
    reject_below=0.25, cap=2.0
)  # sparse-rl with a bound at which a model this small loses some, not all


def model_of(architecture: str = "llama", nudge: float = 0.0):
    model = copy.deepcopy(tiny(architecture, vocab_size=len(tiny_tokenizer())))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(nudge * torch.randn(parameter.shape, generator=generator))
    return model


def rewards(completions, **_):
    """Something with spread in every group."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


@pytest.fixture
def made(tmp_path):
    """A trainer as a script makes one."""

    def make(
        model=None,
        micro_batches: int = 1,
        peft_config=None,
        tokenizer=None,
        prompts=PROMPTS,
        eval_dataset=None,
        **options,
    ):
        model = model or model_of()
        if options.get("beta"):  # TRL loads the reference from where the config says that the model is from
            model_of(nudge=0.02).save_pretrained(tmp_path / "reference")
            model.config._name_or_path = str(tmp_path / "reference")
        config = trl.GRPOConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "report_to": "none",
                "use_cpu": True,
                "bf16": False,
                "disable_tqdm": True,
                "per_device_train_batch_size": len(ROWS) // micro_batches,
                "gradient_accumulation_steps": micro_batches,
                "num_generations": GENERATIONS,
                "max_completion_length": NEW,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "use_bias_correction_kl": False,
                **options,
            }
        )
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=rewards,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            eval_dataset=eval_dataset,
            processing_class=tokenizer or tiny_tokenizer(),
            peft_config=peft_config,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = micro_batches
        return trainer

    return make


@pytest.fixture
def sparse(made):
    def make(replay: bool = False, correction=None, rows=None, **options):
        return use_sparse_rollouts(made(**options), **CACHE, rows=rows, replay=replay, correction=correction)

    return make


def generated(trainer) -> dict:
    return trainer._generate_and_score_completions([dict(row) for row in ROWS])


def gap_of(batch: dict) -> torch.Tensor:
    return (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]


def our_batch(trainer, advantages, how: Correction, loss: Loss, view: str, reference=None):
    """The rollouts of the trainer's last generation, scored and weighed by our own pipeline."""
    sampled = collate(trainer.vllm_generation.trajectories)
    scored = score(trainer.model, sampled, 10_000, trainer.temperature, reference=reference, view=view)
    return batches_of(scored, advantages, how, loss)[0]


def our_gradient(model, batch, loss: Loss, temperature: float = 1.0) -> tuple[float, torch.Tensor]:
    fresh = model_of()
    fresh.load_state_dict(model.state_dict())
    learner = Learner(fresh, OptimizerSettings(), loss, temperature=temperature)
    value = learner._backward(batch, torch.arange(len(batch.tokens)))[0]["loss"].item()
    return value, gradient(learner.model)


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def nudge(model) -> None:
    """Other weights than those that sampled: ratios away from 1, some of them clipped."""
    model.load_state_dict(model_of(nudge=0.01).state_dict())


def assert_same(theirs: tuple[float, torch.Tensor], ours: tuple[float, torch.Tensor], tolerance: float = 1e-5) -> None:
    largest = ours[1].abs().max().item()
    assert largest > 1e-3
    assert theirs[0] == pytest.approx(ours[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(theirs[1], ours[1], rtol=0, atol=tolerance * max(1, largest))


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completions_are_those_of_our_engine(sparse, rows, temperature):
    trainer = sparse(rows=rows, temperature=temperature)
    trainer.state.global_step = 3
    batch = generated(trainer)
    model, tokenizer = model_of(), tiny_tokenizer()
    expected = Engine(model, **CACHE, rows=4).generate(
        [tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        group_size=GENERATIONS,
        sampling=Sampling(max_new_tokens=NEW, temperature=temperature, stop_ids=(tokenizer.eos_token_id,)),
        seed=rollout_seed(trainer.args.seed, step=3),
    )
    mask = batch["completion_mask"].bool()
    for i, trajectory in enumerate(expected):
        assert batch["completion_ids"][i][mask[i]].tolist() == trajectory.response_tokens.tolist()
        torch.testing.assert_close(
            batch["sampling_per_token_logps"][i][mask[i]],
            trajectory.sampler_logprobs[trajectory.num_prompt_tokens :],
            rtol=0,
            atol=1e-6,
        )
    assert any((t.trace.evicted_at.long() < len(t.tokens)).any() for t in expected)
    assert generated(trainer)["completion_ids"].tolist() != batch["completion_ids"].tolist()  # the next call draws anew


def test_seeds_differ_by_step_call_process_and_evaluation():
    seeds = {rollout_seed(0, *which) for which in itertools.product((0, 1), repeat=4)}
    assert len(seeds | {rollout_seed(1, 0)}) == 17


@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "gemma2"])
@pytest.mark.parametrize("pad_to_multiple_of", [None, 8])
def test_replay_starts_at_ratio_1(sparse, architecture, pad_to_multiple_of):
    options = dict(pad_to_multiple_of=pad_to_multiple_of)
    dense = generated(sparse(model=model_of(architecture), **options))
    assert gap_of(dense).abs().max() > 0.1
    trainer = sparse(replay=True, model=model_of(architecture), **options)
    batch = generated(trainer)
    assert batch["completion_ids"].tolist() == dense["completion_ids"].tolist()
    assert (batch["prompt_mask"] == 0).any()  # some prompts are padded
    assert gap_of(batch).abs().max() < 1e-4
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.ones_like(batch["importance_sampling_ratio"]))
    assert any((t.evicted_at.long() < t.num_tokens).any() for t in batch[TRACES])


def with_other_experts(traces):
    return [dataclasses.replace(t, routes=(t.routes + 1) % 8) for t in traces]


def logprobs_of(trainer, model, batch, traces):
    trainer.vllm_generation.traces = traces
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]


@pytest.mark.parametrize("adapters", [False, True])
def test_the_policy_follows_the_sampler_s_experts_and_the_reference_does_not(sparse, adapters):
    peft = pytest.importorskip("peft") if adapters else None
    config = peft and peft.LoraConfig(r=2, target_modules=["q_proj"])
    trainer = sparse(replay=True, model=model_of("qwen3-moe"), peft_config=config, router_aux_loss_coef=0.0)
    batch = generated(trainer)
    assert gap_of(batch).abs().max() < 1e-4
    assert all(t.routes is not None and t.routes.shape == (t.num_tokens, 3, 2) for t in batch[TRACES])

    def moves(model):
        found = [logprobs_of(trainer, model, batch, t) for t in (batch[TRACES], with_other_experts(batch[TRACES]))]
        return (found[0] - found[1]).abs().max() > 0.01

    assert moves(trainer.model)
    if adapters:
        with trainer.model.disable_adapter():
            assert not moves(trainer.model)
    else:
        assert not moves(model_of("qwen3-moe"))


def test_a_mixture_learns_under_replay(sparse):
    trainer = sparse(
        replay=True, model=model_of("mixtral"), router_aux_loss_coef=0.0, beta=0.1, max_steps=1, learning_rate=1e-2
    )
    before = trainer.model.model.layers[0].mlp.gate.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.model.layers[0].mlp.gate.weight, before)


def test_routers_that_cannot_follow_are_said(made, monkeypatch):
    monkeypatch.setattr("sparse_rl.integrations.trl_routes.why_not_replayed", lambda _: "has strange routers")
    with pytest.warns(UserWarning, match="has strange routers, so its routing is not replayed"):
        trainer = use_sparse_rollouts(made(model=model_of("qwen3-moe"), router_aux_loss_coef=0.0), **CACHE, replay=True)
    assert all(t.routes is None for t in generated(trainer)[TRACES])


def test_traces_follow_their_rows_through_shuffling_and_splitting(sparse):
    """The training forward finds the old log-probs, which are known to equal the sampler's, in every micro-batch."""
    trainer = sparse(replay=True, micro_batches=3)
    order = []
    for step in range(3):
        trainer._step = step
        inputs = trainer._prepare_inputs([dict(row) for row in ROWS])
        order += inputs["completion_ids"].tolist()
        mask = inputs["completion_mask"].bool()
        trainer.vllm_generation.traces = inputs[TRACES]
        new, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
        )
        assert new.requires_grad and (entropies[mask] > 0).all()
        torch.testing.assert_close(new[mask], inputs["sampling_per_token_logps"][mask], rtol=0, atol=1e-4)
        torch.testing.assert_close(new[mask], inputs["old_per_token_logps"][mask], rtol=0, atol=1e-4)
    sampled = [t.response_tokens.tolist() for t in trainer.vllm_generation.trajectories]
    assert [row[: len(known)] for row, known in zip(order, sampled)] != sampled  # they were shuffled


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_replayed_gradient_is_our_learner_s(sparse, loss_type, checkpointing):
    trainer = sparse(replay=True, loss_type=loss_type, gradient_checkpointing=checkpointing, temperature=0.8)
    batch, loss = generated(trainer), LOSSES[loss_type]
    expected = our_batch(trainer, batch["advantages"], PRESETS["none"], loss, "shadow")
    nudge(trainer.model)
    theirs = trainer._compute_loss(trainer.model, batch)
    theirs.backward()
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > 0
    found = theirs.item(), gradient(trainer.model)
    assert_same(found, our_gradient(trainer.model, expected, loss, 0.8))
    dense = our_batch(trainer, batch["advantages"], PRESETS["none"], loss, "dense")
    other = our_gradient(trainer.model, dense, loss, 0.8)[1]
    assert (other - found[1]).abs().max() > 0.01 * found[1].abs().max()  # the view matters


def test_the_reference_is_replayed_too(sparse):
    trainer = sparse(replay=True, loss_type="grpo", beta=0.3)
    batch, loss = generated(trainer), Loss(beta=0.3)
    expected = our_batch(
        trainer, batch["advantages"], PRESETS["none"], loss, "shadow", contextlib.nullcontext(model_of(nudge=0.02))
    )
    nudge(trainer.model)
    theirs = trainer._compute_loss(trainer.model, batch)
    theirs.backward()
    assert_same((theirs.item(), gradient(trainer.model)), our_gradient(trainer.model, expected, loss))


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("replay", [False, True])
def test_training_steps_add_up_to_our_optimizer_step(sparse, replay, micro_batches):
    correction = STRICT if not replay else PRESETS["none"]
    trainer = sparse(
        replay=replay, correction=correction, micro_batches=micro_batches, loss_type="dapo", num_iterations=2
    )
    rows = [dict(row) for row in ROWS]

    def optimizer_step() -> float:
        trainer.model.zero_grad()
        return sum(trainer.training_step(trainer.model, rows, None).item() for _ in range(micro_batches))

    optimizer_step()  # generates
    advantages = dict(
        zip(map(tuple, _completions(trainer)), torch.cat([b["advantages"] for b in trainer._buffered_inputs]).tolist())
    )
    ordered = torch.tensor(
        [advantages[tuple(t.response_tokens.tolist())] for t in trainer.vllm_generation.trajectories]
    )
    expected = our_batch(trainer, ordered, correction, LOSSES["dapo"], "shadow" if replay else "dense")
    nudge(trainer.model)
    assert_same((optimizer_step(), gradient(trainer.model)), our_gradient(trainer.model, expected, LOSSES["dapo"]))


def _completions(trainer) -> list[list[int]]:
    return [
        row[: int(mask.sum())].tolist()
        for inputs in trainer._buffered_inputs
        for row, mask in zip(inputs["completion_ids"], inputs["completion_mask"])
    ]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    "correction", [*PRESETS, STRICT, dataclasses.replace(STRICT, mask_outside=(0.8, 1.25))], ids=str
)
def test_our_corrections_give_our_weights_masks_and_loss(sparse, correction, loss_type):
    trainer = sparse(
        correction=correction, loss_type=loss_type, vllm_importance_sampling_correction=False
    )  # ours are on all the same
    batch, loss = generated(trainer), LOSSES[loss_type]
    preset = PRESETS[correction] if isinstance(correction, str) else correction
    expected = our_batch(trainer, batch["advantages"], preset, loss, "dense")
    mask, response = batch["tool_mask"].bool(), batch["completion_mask"].bool()
    assert mask.sum(1).tolist() == expected.mask.sum(1).tolist()
    assert batch["importance_sampling_ratio"][mask].tolist() == pytest.approx(
        expected.weights[expected.mask].tolist(), rel=1e-4
    )
    assert batch["num_items_in_batch"] == expected.mask.sum()
    if not isinstance(correction, str):
        rejected = trainer._metrics["train"]["sparse_rl/reject/trajectories/frac"][-1]
        assert 0 < rejected < 1 and mask.any(1).float().mean().item() == pytest.approx(1 - rejected)
        assert trainer._metrics["train"]["sparse_rl/reject/tokens/frac"][-1] == pytest.approx(
            1 - (mask.sum() / response.sum()).item()
        )
    if not mask.any():  # geo's band: nothing is left of rollouts this different
        assert correction == "geo"
        return
    nudge(trainer.model)
    theirs = trainer._compute_loss(trainer.model, batch)
    theirs.backward()
    found = theirs.item(), gradient(trainer.model)
    assert_same(
        found, our_gradient(trainer.model, expected, loss), 3e-5
    )  # TRL's dense rows are padded, so their positions round elsewhere


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_trl_s_own_correction(made, recwarn, mode):
    trainer = made(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.2)
    use_sparse_rollouts(trainer, **CACHE, correction="trl")
    said = [str(w.message) for w in recwarn if "token_truncate" in str(w.message)]
    assert len(said) == (mode == "sequence_mask")
    batch = generated(trainer)
    gap = torch.where(
        batch["completion_mask"].bool(), batch["old_per_token_logps"] - batch["sampling_per_token_logps"], 0.0
    )
    xi = gap.sum(1, keepdim=True).exp() if mode == "sequence_mask" else gap.exp()
    expected = xi.clamp(max=1.2) if mode == "token_truncate" else torch.where(xi > 1.2, 0.0, xi)
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected)
    assert "tool_mask" not in batch
    silenced = trainer._metrics["train"]["sparse_rl/reject/trajectories/frac"][-1]
    assert silenced == pytest.approx((expected == 0).all(1).float().mean().item())


def test_training_logs_ratios_and_savings_and_moves_the_weights(sparse):
    evaluation = datasets.Dataset.from_dict({"prompt": PROMPTS[:2]})
    trainer = sparse(
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=2,
        per_device_eval_batch_size=2,
        eval_dataset=evaluation,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    first, evaluated = trainer.state.log_history[:2]
    assert (
        first["sampling/importance_sampling_ratio/min"] < 0.9 and first["sampling/importance_sampling_ratio/max"] <= 2
    )
    assert 0 < first["sparse_rl/kv_tokens_saved"] < 1 and first["sparse_rl/gap/abs/mean"] > 0.01
    assert {
        "sparse_rl/reject/trajectories/frac",
        "sparse_rl/gap/xi/p05",
        "sparse_rl/kv_bytes_saved",
        "loss",
    } <= first.keys()
    assert {"eval_sparse_rl/gap/abs/mean", "eval_sparse_rl/kv_tokens_saved", "eval_reward"} <= evaluated.keys()
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.vllm_generation.engine.version == 2


def test_the_model_is_given_back_as_it_was(sparse):
    trainer = sparse(max_steps=1, bf16=True)  # accelerate puts autocast around the forward
    trainer.train()
    model = trainer.model.train()
    before = vars(model).get("forward"), model.config._attn_implementation
    assert before[0] is not None
    generated(trainer)
    assert (vars(model).get("forward"), model.config._attn_implementation) == before
    assert all(module.training for module in model.modules())


def test_sampling_is_not_under_autocast(sparse):
    """fp32 weights are sampled in fp32 whatever the learner's precision; then replay differs only by its rounding."""
    found = {}
    for bf16 in (False, True):
        trainer = sparse(replay=True, max_steps=1, bf16=bf16)
        trainer.train()
        found[bf16] = [t.tokens.tolist() for t in trainer.vllm_generation.trajectories], trainer.state.log_history[0]
    assert found[True][0] == found[False][0]
    assert found[False][1]["sparse_rl/gap/abs/mean"] < 1e-5 < found[True][1]["sparse_rl/gap/abs/mean"] < 0.05


def test_replay_under_autocast_attends_in_one_dtype(sparse, monkeypatch):
    """As stock attention does; the kernels of a GPU take nothing else."""
    seen = set()
    attend = ops.trace_attention
    monkeypatch.setattr(
        ops, "trace_attention", lambda *given: seen.add(tuple(x.dtype for x in given[:3])) or attend(*given)
    )
    sparse(replay=True, max_steps=1, bf16=True).train()
    assert seen == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize("replay", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(sparse, tmp_path, replay):
    def run(folder: str, steps: int, resume: bool = False):
        options = dict(
            output_dir=str(tmp_path / folder),
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trainer = sparse(replay=replay, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole, first = run("whole", 4), run("parts", 2)
    parts = run("parts", 4, resume=True)
    assert first.state.global_step == 2
    for name, parameter in whole.model.named_parameters():  # TRL sums over rows in another order, hence the tolerance
        torch.testing.assert_close(parameter, parts.model.get_parameter(name), rtol=0, atol=1e-6)
    drawn, again = (
        sorted(t.tokens.tolist() for t in trainer.vllm_generation.trajectories) for trainer in (whole, parts)
    )
    assert drawn == again
    for one, other in zip(whole.state.log_history[:4], parts.state.log_history[:4], strict=True):
        for name in ("loss", "reward", "sparse_rl/gap/abs/mean", "sparse_rl/reject/tokens/frac", "num_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)


def test_adapters_with_dropout(sparse):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match=r"dropout of 0\.1 was set to 0"):
        trainer = sparse(replay=True, max_steps=2, peft_config=config, beta=0.1)
    trainer.train()
    assert all(log["sampling/sampling_logp_difference/max"] < 1e-4 for log in trainer.state.log_history[:2])
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert adapters and all(p.abs().max() > 0 for p in adapters)
    assert generated(trainer)["completion_ids"].shape[0] == len(ROWS)


@pytest.mark.parametrize("replay", [False, True])
def test_completions_that_are_cut_off_move_nothing_when_masked(sparse, replay):
    trainer = sparse(replay=replay, max_steps=1, mask_truncated_completions=True, max_completion_length=3, seed=1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_some_are_cut_off_under_replay(sparse):
    trainer = sparse(replay=True, mask_truncated_completions=True, loss_type="grpo")
    batch = generated(trainer)
    masked = ~batch["completion_mask"].bool().any(1)
    assert 0 < masked.sum() < len(ROWS)
    assert gap_of(batch).abs().max() < 1e-4
    trainer._compute_loss(trainer.model, batch).backward()
    assert gradient(trainer.model).isfinite().all()


TWO_PROCESSES = """
import sys
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from sparse_rl import load_model
from sparse_rl.integrations.trl import use_sparse_rollouts
from accelerate.utils import gather_object

model, tokenizer = load_model("tiny-sums", device="cpu")
config = GRPOConfig(sys.argv[1], report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, num_generations=8, max_completion_length=40, max_steps=2, logging_steps=1,
    learning_rate=1e-3, save_strategy="no", temperature=1.5)
trainer = GRPOTrainer(model, reward_funcs=lambda completions, **_: [len(c) % 7.0 for c in completions], args=config,
    train_dataset=Dataset.from_dict({"prompt": ["3+4+1+5+2=", "9+9+1=", "7+2+2+1="]}), processing_class=tokenizer)
use_sparse_rollouts(trainer, budget=16, interval=4, replay=True)
trainer.train()
weights = trainer.accelerator.gather(torch.cat([p.detach().flatten() for p in trainer.model.parameters()])[None])
mine = trainer.vllm_generation.trajectories
drawn = gather_object([[(t.prompt_tokens.tolist(), t.response_tokens.tolist()) for t in mine]])
if trainer.accelerator.is_main_process:
    log = trainer.state.log_history[1]
    print("FOUND", [(weights[0] - weights[1]).abs().max().item(), log["sampling/sampling_logp_difference/max"], *drawn])
"""


def test_two_processes_share_a_group_and_keep_the_same_weights(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        str(tmp_path / "out"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    apart, gap, first, second = ast.literal_eval(
        next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:]
    )
    assert apart == 0 and gap < 1e-4
    assert len(first) == len(second) == 4
    assert len({tuple(prompt) for prompt, _ in first + second}) == 1  # half of a group each
    assert not {tuple(response) for _, response in first} & {
        tuple(response) for _, response in second
    }  # of streams of their own


def test_conversations(sparse):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer = sparse(replay=True, max_steps=1, tokenizer=tokenizer, prompts=prompts)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    asked = {tokenizer.decode(t.prompt_tokens) for t in trainer.vllm_generation.trajectories}
    assert asked == {f"user: {prompt}\nassistant: " for prompt in PROMPTS}


def test_stop_tokens_of_the_generation_config_end_completions(made):
    trainer = made()
    trainer.model.generation_config.eos_token_id = [5, 9]
    use_sparse_rollouts(trainer, **CACHE)
    assert trainer.vllm_generation.sampling.stop_ids == (1, 5, 9)
    generated(trainer)
    ends = [t.response_tokens[-1].item() for t in trainer.vllm_generation.trajectories if t.finish_reason == "stop"]
    assert ends and set(ends) <= {1, 5, 9}


def test_a_damaged_trace_is_refused(sparse):
    trainer = sparse(replay=True)
    sampler, generate = trainer.vllm_generation, trainer.vllm_generation.generate

    def swapped(*args, **kwargs):
        found = generate(*args, **kwargs)
        lengths = [t.num_tokens for t in sampler.traces]
        i, j = next((i, j) for i in range(len(lengths)) for j in range(i) if lengths[i] == lengths[j])
        sampler.traces[i], sampler.traces[j] = sampler.traces[j], sampler.traces[i]
        return found

    sampler.generate = swapped
    with pytest.raises(SparseRLError, match="the traces do not belong to these tokens"):
        generated(trainer)


REFUSED = {
    "top_p": (dict(top_p=0.9), {}, "set top_k=0 and top_p=1"),
    "top_k": (dict(top_k=5), {}, "set top_k=0 and top_p=1"),
    "min_p": (dict(min_p=0.1), {}, "min_p=0.1 is not supported"),
    "repetition_penalty": (dict(repetition_penalty=1.1), {}, "set it to 1.0"),
    "generation_kwargs": (dict(generation_kwargs={"num_beams": 2}), {}, "leave them None"),
    "naive under replay": ({}, dict(replay=True, correction="naive"), "nothing to replay"),
    "clip_kl": (dict(beta=0.1), dict(correction="sparse-rl-released"), "clip_kl=None"),
    "vespo": (dict(loss_type="vespo"), dict(correction="trl"), "token_truncate"),
    "unknown": ({}, dict(correction="sparse"), "did you mean"),
    "budget": ({}, dict(budget=4), "raise the budget"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(made, case):
    options, settings, said = REFUSED[case]
    with pytest.raises(SparseRLError, match=said):
        use_sparse_rollouts(made(**options), **{**CACHE, **settings})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rollout_func", print, "omit it"),
        ("_is_vlm", True, "text model"),
        ("is_fsdp_enabled", True, "launch with DDP"),
        ("is_deepspeed_enabled", True, "launch with DDP"),
        ("use_liger_kernel", True, "use_liger_kernel=False"),
    ],
)
def test_trainers_that_are_refused(made, name, value, said):
    trainer = made()
    setattr(trainer, name, value)
    with pytest.raises(SparseRLError, match=said):
        use_sparse_rollouts(trainer, **CACHE)
    assert type(trainer) is trl.GRPOTrainer and not trainer.use_vllm


def test_refusals_of_other_trainers_and_versions(made, monkeypatch):
    with pytest.raises(SparseRLError, match="object is not a GRPOTrainer"):
        use_sparse_rollouts(object())
    trainer = use_sparse_rollouts(made(), **CACHE)
    with pytest.raises(SparseRLError, match="already"):
        use_sparse_rollouts(trainer, **CACHE)
    other = made()
    del other.vllm_importance_sampling_mode
    with pytest.raises(
        SparseRLError, match=r"has no vllm_importance_sampling_mode: sparse rollouts support trl>=1\.12,<2"
    ):
        use_sparse_rollouts(other, **CACHE)
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda self, model, tokens: None)
    with pytest.raises(SparseRLError, match=r"has no _get_per_token_logps_and_entropies\(input_ids\)"):
        use_sparse_rollouts(made(), **CACHE)


def test_top_p_without_any_correction(made):
    trainer = made(top_p=0.9, top_k=20, vllm_importance_sampling_correction=False, max_steps=1)
    use_sparse_rollouts(trainer, **CACHE, correction="trl")
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_the_example(tmp_path, monkeypatch, capsys):
    def run(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--out", str(tmp_path), *arguments])
        return runpy.run_path(str(EXAMPLE), run_name="__main__")

    first = run("--steps", "2")["trainer"]
    before = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    resumed = run("--steps", "3", "--resume")["trainer"]
    logs = [log for log in resumed.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3]
    assert all(
        {"sampling/importance_sampling_ratio/mean", "sparse_rl/kv_tokens_saved", "reward"} <= log.keys() for log in logs
    )
    assert any(not torch.equal(p, before[name]) for name, p in resumed.model.named_parameters())
    run("--steps", "1", "--replay", "--out", str(tmp_path / "replay"))
    assert "ratio" in capsys.readouterr().out
