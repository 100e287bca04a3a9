"""Our advantages, weights, losses and gradients against TRL's GRPOTrainer, on the same rollouts, if TRL is installed.

A stand-in for its vLLM engine hands TRL planted completions and sampler log-probs. TRL's own code then pads and scores
them, computes advantages and importance ratios and, once the weights have changed, the loss and its gradient. Our side
starts from the same tokens, rewards and sampler log-probs and shares nothing else with it.

Where the two are defined differently, the exact relation between them is tested:

    mis           a token outside the band adds nothing to TRL's surrogate, but still counts in its means, its sequence
                  ratio and its KL. We omit it from all of them, as TRL does with a token that a tool wrote.
    geo           rejects by exp(mean gap); TRL's ratio of a sequence is exp(sum of gaps).
    beta          TRL multiplies the KL by the policy ratio unless `use_bias_correction_kl` is off; ours never does.
    token-mean    over the optimizer step, as in TRL's dapo. Its bnpo is the average of the micro-batches' token means.
"""

import copy
import dataclasses
import functools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.correct import PRESETS, Correction, correct
from sparse_rl.learn.loss import Loss, k3, policy_loss, ratio, token_scale
from sparse_rl.learn.score import token_logprobs
from sparse_rl.models import tiny_tokenizer
from tests.helpers.models import tiny

trl = pytest.importorskip("trl", minversion="1.12")
datasets = pytest.importorskip("datasets")

PROMPTS = ["3+4=", "sum of 12 and 7", "x"]
GENERATIONS = 4
GROUP = torch.arange(len(PROMPTS)).repeat_interleave(GENERATIONS)
LENGTHS = [5, 1, 8, 3, 7, 2, 6, 4, 3, 1, 5, 9]  # tokens of each completion, the end included
CUT_OFF = 3  # this completion does not end, so none of its tokens count
REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.0, 0.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5])  # the last group has no spread
GAPS = {
    (0, 2): -12.0,
    (2, 5): 3.0,
    (4, 0): -0.8,
    (6, 1): 0.8,
    (9, 0): 1.1,
}  # (completion, token): planted old - sampler
ACCEPT_ALL = torch.ones(len(LENGTHS), dtype=torch.bool)
MAX_LENGTH = 16

OBJECTIVES = {
    "grpo": (dict(loss_type="grpo"), Loss()),
    "grpo-kl": (dict(loss_type="grpo", beta=0.3), Loss(beta=0.3)),
    "grpo-kl-asymmetric": (
        dict(loss_type="grpo", beta=0.3, epsilon=0.1, epsilon_high=0.3, temperature=0.7),
        Loss(beta=0.3, clip_low=0.1, clip_high=0.3),
    ),
    "dr-grpo": (dict(loss_type="dr_grpo", scale_rewards="none"), Loss(mean="dr-grpo", constant=MAX_LENGTH)),
    "dr-grpo-kl": (
        dict(loss_type="dr_grpo", scale_rewards="none", beta=0.3),
        Loss(mean="dr-grpo", constant=MAX_LENGTH, beta=0.3),
    ),
    "dapo": (dict(loss_type="dapo", epsilon_high=0.28), Loss(mean="token-mean", clip_high=0.28)),
    "bnpo-kl": (dict(loss_type="bnpo", beta=0.3), Loss(mean="token-mean", beta=0.3)),
    "gspo": (
        dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-2, epsilon_high=4e-2),
        Loss(level="sequence", clip_low=3e-2, clip_high=4e-2),
    ),
    "gspo-kl": (
        dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-2, beta=0.3),
        Loss(level="sequence", clip_low=3e-2, clip_high=3e-2, beta=0.3),
    ),
    "cispo": (  # their bound is the largest weight itself, and there is no smallest
        dict(loss_type="cispo", epsilon_high=1.05),
        Loss(clip="weight", clip_low=1.0, clip_high=0.05, mean="token-mean"),
    ),
    "cispo-kl": (
        dict(loss_type="cispo", epsilon_high=1.05, beta=0.3),
        Loss(clip="weight", clip_low=1.0, clip_high=0.05, mean="token-mean", beta=0.3),
    ),
}
_OFF = dict(vllm_importance_sampling_correction=False)
_TRUNCATE = dict(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
CORRECTIONS = {
    "naive": _OFF,
    "none": _OFF,
    "geo": _OFF,
    "tis": _TRUNCATE,
    "sparse-rl": _TRUNCATE,
    "mis": dict(
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=2.0,
    ),
}


@functools.cache
def rollouts() -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts and completions, one per trajectory. 1 ends a completion."""
    g = torch.Generator().manual_seed(0)
    tokenizer = tiny_tokenizer()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(GENERATIONS)]
    completions = [[*torch.randint(2, len(tokenizer), (n - 1,), generator=g).tolist(), 1] for n in LENGTHS]
    completions[CUT_OFF][-1] = 5
    return prompts, completions


def response_mask() -> torch.Tensor:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[CUT_OFF] = False
    return mask


@functools.cache
def policy(name: str):
    """The weights that sampled, those one optimizer step later, and the reference's."""
    model = copy.deepcopy(tiny("llama", vocab_size=len(tiny_tokenizer())))
    g = torch.Generator().manual_seed(len(name))
    size = {"old": 0.0, "new": 0.02, "reference": 0.02}[name]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=g))
    return model


def score(model, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the completions, each scored alone and unpadded. [N, T]"""
    rows = [
        token_logprobs(model, torch.tensor([*prompt, *completion]), temperature=temperature)[len(prompt) :]
        for prompt, completion in zip(*rollouts())
    ]
    return pad_sequence(rows, batch_first=True)


@functools.cache
def known(temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampler, old, reference) log-probs [N, T]: the planted ones, and those of the two models."""
    with torch.no_grad():
        old, reference = (score(policy(name), temperature) for name in ("old", "reference"))
    gap = 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    for place, value in GAPS.items():
        gap[place] = value
    return old - gap, old, reference


class Engine:
    """Stands in for TRL's vLLM engine."""

    def __init__(self, temperature: float):
        self.sampler = known(temperature)[0]

    def sync_weights(self):
        pass

    def generate(self, prompts, **_):
        expected, completions = rollouts()
        assert prompts == expected
        logprobs = [[[value] for value in row[:n].tolist()] for row, n in zip(self.sampler, LENGTHS)]
        return prompts, completions, logprobs, None


@pytest.fixture
def trainer_of(tmp_path):
    def make(micro_batches: int = 1, **options):
        model = copy.deepcopy(policy("old"))
        if options.get("beta"):  # TRL loads the reference from where the config says that the model is from
            policy("reference").save_pretrained(tmp_path / "reference")
            model.config._name_or_path = str(tmp_path / "reference")
        config = trl.GRPOConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "report_to": "none",
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "per_device_train_batch_size": len(LENGTHS) // micro_batches,
                "gradient_accumulation_steps": micro_batches,
                "num_generations": GENERATIONS,
                "num_iterations": 2,  # the rollouts are used again once the weights have changed
                "max_completion_length": MAX_LENGTH,
                "mask_truncated_completions": True,
                "use_bias_correction_kl": False,
                **options,
            }
        )
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: REWARDS.tolist(),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
        )
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(config.temperature), -1
        trainer.current_gradient_accumulation_steps = micro_batches
        trainer.model.train()
        return trainer

    return make


def their_batch(trainer) -> dict:
    return trainer._generate_and_score_completions(
        [{"prompt": prompt} for prompt in PROMPTS for _ in range(GENERATIONS)]
    )


def their_loss(trainer, *micro_batches: dict) -> torch.Tensor:
    trainer.model.load_state_dict(policy("new").state_dict())
    return sum(trainer._compute_loss(trainer.model, batch) for batch in micro_batches)


def our_loss(options: dict, loss: Loss, correction: Correction, **changes):
    """(loss, metric sums). `changes` replace mask, weights or scale."""
    sampler, old, reference = known(options.get("temperature", 1.0))
    old = sampler if correction.old == "sampler" else old
    advantages, _ = advantage(REWARDS, GROUP, "dr-grpo" if options.get("scale_rewards") == "none" else "grpo", eps=1e-4)
    corrected = correct(old - sampler, response_mask(), correction)
    mask, weights = changes.get("mask", corrected.mask), changes.get("weights", corrected.weights)
    scale = changes.get("scale", token_scale(corrected.mask, corrected.accepted, loss))
    logprobs = score(policy("new"), options.get("temperature", 1.0))
    return policy_loss(logprobs, old, advantages.float(), mask, weights, scale, loss, reference)[:2]


def gradient(loss: torch.Tensor, model) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, their_gradient: torch.Tensor) -> None:
    """The loss and the gradient of every weight. Log-probs are fp32 and one side pads, hence the tolerance."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    largest = their_gradient.abs().max().item()
    assert largest > 1e-3
    torch.testing.assert_close(gradient(ours, policy("new")), their_gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("preset", ["none", "tis"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient(trainer_of, objective, preset):
    options, loss = OBJECTIVES[objective]
    trainer = trainer_of(**options, **CORRECTIONS[preset])
    theirs = their_loss(trainer, their_batch(trainer))
    ours, sums = our_loss(options, loss, PRESETS[preset])
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    if loss.clip == "weight":  # they count the tokens that would gain alone
        assert 0 < metrics["cispo_clip_ratio"] < (sums["clipped"] / sums["tokens"]).item() < 1
    else:  # both ends of the clip are at work
        assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    if loss.level == "token" and loss.clip == "ratio":
        assert (sums["clipped"] / sums["tokens"]).item() == pytest.approx(metrics["clip_ratio/region_mean"])
    if loss.beta:
        assert (sums["kl"] / sums["tokens"]).item() == pytest.approx(metrics["kl"], rel=1e-5)
    assert_same(ours, theirs, gradient(theirs, trainer.model))


@pytest.mark.parametrize("preset", ["naive", "geo", "mis", "sparse-rl"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_we_drop_is_like_a_tool_s_token(trainer_of, objective, preset):
    """TRL neither rejects nor drops tokens from its means. Told that a tool wrote them, it finds our loss."""
    options, loss = OBJECTIVES[objective]
    correction = PRESETS[preset]
    trainer = trainer_of(**options, **CORRECTIONS[preset])
    batch = their_batch(trainer)
    sampler, old, _ = known(options.get("temperature", 1.0))
    kept = correct((sampler if correction.old == "sampler" else old) - sampler, response_mask(), correction).mask
    assert (preset == "naive") == torch.equal(kept, response_mask())
    batch.update(tool_mask=kept.long(), num_items_in_batch=kept.sum())
    if correction.old == "sampler":
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
    theirs = their_loss(trainer, batch)
    assert_same(our_loss(options, loss, correction)[0], theirs, gradient(theirs, trainer.model))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_tokens_count_in_the_means_of_trl(trainer_of, objective):
    """TRL's token_mask is our loss with weights of 0, not with a smaller mask. For dr-grpo without KL, it is `mis`."""
    options, loss = OBJECTIVES[objective]
    trainer = trainer_of(**options, **CORRECTIONS["mis"])
    theirs = their_loss(trainer, their_batch(trainer))
    their_gradient = gradient(theirs, trainer.model)
    sampler, old, _ = known(options.get("temperature", 1.0))
    response, corrected = response_mask(), correct(old - sampler, response_mask(), PRESETS["mis"])
    zeroed = dict(
        mask=response, weights=corrected.weights * corrected.mask, scale=token_scale(response, corrected.accepted, loss)
    )
    assert_same(our_loss(options, loss, PRESETS["mis"], **zeroed)[0], theirs, their_gradient)
    as_it_is = our_loss(options, loss, PRESETS["mis"])[0]
    if objective == "dr-grpo":
        assert_same(as_it_is, theirs, their_gradient)
    else:
        assert abs(as_it_is - theirs) > 1e-4


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("objective", ["grpo-kl", "dr-grpo-kl", "dapo", "gspo", "cispo"])
def test_accumulated_micro_batches(trainer_of, objective, micro_batches):
    """TRL's training steps, which shuffle and cut the rollouts, add up to our loss of the whole optimizer step."""
    options, loss = OBJECTIVES[objective]
    trainer = trainer_of(micro_batches, **options, **CORRECTIONS["tis"])
    rows = [{"prompt": prompt} for prompt in PROMPTS for _ in range(GENERATIONS)]

    def optimizer_step():
        trainer.model.zero_grad()
        return sum(trainer.training_step(trainer.model, rows, None) for _ in range(micro_batches))

    optimizer_step()  # generates
    trainer.model.load_state_dict(policy("new").state_dict())
    theirs = optimizer_step()
    their_gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
    assert_same(our_loss(options, loss, PRESETS["tis"])[0], theirs, their_gradient)


def test_bnpo_averages_the_means_of_micro_batches(trainer_of):
    options, loss = OBJECTIVES["bnpo-kl"]
    trainer = trainer_of(2, **options, **CORRECTIONS["tis"])
    batch = their_batch(trainer)
    del batch["num_items_in_batch"]
    halves = [slice(0, 6), slice(6, 12)]
    theirs = their_loss(trainer, *({name: values[half] for name, values in batch.items()} for half in halves))
    scale = torch.cat([token_scale(response_mask()[half], ACCEPT_ALL[half], loss) / 2 for half in halves])
    assert_same(our_loss(options, loss, PRESETS["tis"], scale=scale)[0], theirs, gradient(theirs, trainer.model))
    assert abs(our_loss(options, loss, PRESETS["tis"])[0] - theirs) > 1e-4


@pytest.mark.parametrize("objective", ["grpo-kl", "dr-grpo-kl", "gspo-kl"])
def test_their_default_kl_is_ours_times_the_ratio(trainer_of, objective):
    options, loss = OBJECTIVES[objective]
    trainer = trainer_of(**options, **CORRECTIONS["tis"], use_bias_correction_kl=True)
    theirs = their_loss(trainer, their_batch(trainer))
    _, old, reference = known()
    response, logprobs = response_mask(), score(policy("new"))
    scale = token_scale(response, ACCEPT_ALL, loss)
    weighted = (scale * ratio(logprobs, old, response, loss.level) * k3(logprobs, reference))[response].sum()
    ours = our_loss(options, dataclasses.replace(loss, beta=0.0), PRESETS["tis"])[0] + loss.beta * weighted
    assert_same(ours, theirs, gradient(theirs, trainer.model))


@pytest.mark.parametrize(("preset", "dropped"), [("tis", 0), ("mis", 5)])
def test_importance_ratios(trainer_of, preset, dropped):
    batch = their_batch(trainer_of(**CORRECTIONS[preset]))
    sampler, old, _ = known()
    response = response_mask()
    assert torch.equal(batch["completion_mask"].bool(), response)
    torch.testing.assert_close(batch["old_per_token_logps"][response], old[response], rtol=1e-5, atol=1e-5)
    corrected = correct(old - sampler, response, PRESETS[preset])
    theirs = batch["importance_sampling_ratio"]
    torch.testing.assert_close((corrected.weights * corrected.mask)[response], theirs[response], rtol=1e-5, atol=0)
    assert torch.equal(corrected.mask, (theirs > 0) & response)
    assert (response & ~corrected.mask).sum() == dropped
    assert preset == "mis" or (theirs == 2).sum() == 3  # the planted gaps above log 2


def test_the_ratio_of_a_sequence(trainer_of):
    """exp(sum of gaps) there, exp(mean of gaps) here: theirs is ours to the power of the length."""
    mode = dict(vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=None)
    theirs = their_batch(trainer_of(**mode))["importance_sampling_ratio"][:, 0]
    sampler, old, _ = known()
    response = response_mask()
    mean = theirs ** (1 / response.sum(1).clamp(min=1))
    for low, high in [(0.99, 1.01), (0.9, 1.1), (0.5, 2.0)]:
        accepted = correct(old - sampler, response, Correction(reject_outside=(low, high))).accepted
        assert accepted.tolist() == [low <= value <= high for value in mean.tolist()]
        assert 0 < accepted.sum() < len(accepted)


def test_the_veto_is_a_token_mask_for_the_whole_trajectory(trainer_of):
    mode = dict(
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=1e-4,
        vllm_importance_sampling_clip_max=None,
    )
    theirs = their_batch(trainer_of(**mode))["importance_sampling_ratio"]
    sampler, old, _ = known()
    accepted = correct(old - sampler, response_mask(), PRESETS["sparse-rl"]).accepted
    assert (
        accepted.tolist() == (theirs > 0).all(1).tolist() == [i != 0 for i in range(len(LENGTHS))]
    )  # the planted gap of -12


@pytest.mark.parametrize(("scale_rewards", "estimator"), [("group", "grpo"), ("none", "dr-grpo")])
def test_advantages(trainer_of, scale_rewards, estimator):
    trainer = trainer_of(scale_rewards=scale_rewards, **CORRECTIONS["none"])
    theirs = their_batch(trainer)["advantages"]
    ours, metrics = advantage(REWARDS, GROUP, estimator, eps=1e-4)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=1e-6)
    assert theirs[:8].abs().min() > 0 and not theirs[8:].any()
    assert metrics["advantage/groups_without_variance/frac"] == pytest.approx(
        trainer._metrics["train"]["frac_reward_zero_std"][-1]
    )
