"""Stand-ins for the hosts of sparse_rl.integrations that are not installed: what their code does with a plug-in.

verl 0.9.1       trainer/ppo/core_algos.py (registry, signature, agg_loss),
                 trainer/ppo/rollout_corr_helper.py (token weights),
                 workers/rollout/base.py and replica.py (registries, the record of an answer)
slime 0.3, 0.4   backends/megatron_utils/loss.py and cp_utils.py (signature of a TIS function, its reducers;
                 one rank, or several that share responses)
prime-rl 0.8     trainer/rl/loss.py (LossInputs, LossOutputs, compute_loss of the rl component)
"""

import dataclasses
import sys
import types
import typing

import torch


def module(monkeypatch, path: str, **names) -> types.ModuleType:
    """A module of this dotted path, and the packages above it, while the test runs."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        above = ".".join(parts[:i])
        if above not in sys.modules:
            package = types.ModuleType(above)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, above, package)
    made = types.ModuleType(path)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, path, made)
    return made


# verl


def verl_agg_loss(
    loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None
):
    total = (loss_mat * loss_mask).sum(-1)
    count = loss_mask.sum(-1)
    if loss_agg_mode == "token-mean":
        return total.sum() / (count.sum() if batch_num_tokens is None else batch_num_tokens) * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        total = total / (count + 1e-8)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        total = total / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    sequences = (count > 0).sum() if global_batch_size is None else global_batch_size
    return total.sum() / sequences * dp_size


def stand_in_for_verl(monkeypatch) -> None:
    registry = {}

    def register_policy_loss(name):
        return lambda fn: registry.setdefault(name, fn)

    @dataclasses.dataclass
    class PolicyLossConfig:
        loss_mode: str = "vanilla"

        def get(self, name, default=None):
            return getattr(self, name, default)

    module(
        monkeypatch,
        "verl.trainer.ppo.core_algos",
        agg_loss=verl_agg_loss,
        register_policy_loss=register_policy_loss,
        get_policy_loss_fn=registry.__getitem__,
    )

    @dataclasses.dataclass
    class TokenOutput:
        token_ids: list
        log_probs: list | None = None
        stop_reason: str | None = None
        extra_fields: dict = dataclasses.field(default_factory=dict)

    class RolloutReplicaRegistry:
        known: typing.ClassVar[dict] = {}
        register = known.__setitem__

    module(monkeypatch, "verl.workers.config", PolicyLossConfig=PolicyLossConfig)
    module(monkeypatch, "verl.workers.rollout.base", _ROLLOUT_REGISTRY={})
    replica = {"RolloutReplicaRegistry": RolloutReplicaRegistry, "TokenOutput": TokenOutput}
    module(monkeypatch, "verl.workers.rollout.replica", **replica)
    monkeypatch.delitem(sys.modules, "sparse_rl.integrations.verl", raising=False)


def verl_token_weights(old, rollout, mask, threshold):
    return ((old - rollout).clamp(-20, 20).exp() * mask).clamp(max=threshold)


# slime


def slime_token_loss(logprobs, old, advantages, low, high):
    r = (logprobs - old).exp()
    return torch.maximum(-r * advantages, -r.clamp(1 - low, 1 + high) * advantages)


def slime_mean(token_loss, masks, own: list, denominators, per_token: bool):
    """The sum over sequences of means, or of tokens. own: this rank's tokens; denominators None: sums of masks."""
    result, start = 0.0, 0
    for i, (mask, index) in enumerate(zip(masks, own)):
        piece = (token_loss[start : start + len(index)] * mask[index]).sum()
        start += len(index)
        count = mask.sum() if denominators is None else denominators[i]
        result = result + (piece if per_token else piece / count.clamp(min=1))
    return result


def stand_in_for_slime(monkeypatch, own=None, whole=None) -> None:
    """One rank, or the rank that has the tokens `own[i]` of response i, whose gathered tensors are `whole[i]`."""
    state = {"gathered": 0, "sliced": 0}

    def all_gather_with_cp(tensor, total_length, response_length):
        if own is None:
            return tensor
        i = state["gathered"] % len(own)
        state["gathered"] += 1
        assert torch.equal(tensor, whole[i][own[i]]) and len(whole[i]) == response_length
        return whole[i]

    def slice_log_prob_with_cp(log_prob, total_length, response_length):
        assert len(log_prob) == response_length <= total_length
        if own is None:
            return log_prob
        i = state["sliced"] % len(own)
        state["sliced"] += 1
        return log_prob[own[i]]

    module(
        monkeypatch,
        "slime.backends.megatron_utils.cp_utils",
        all_gather_with_cp=all_gather_with_cp,
        slice_log_prob_with_cp=slice_log_prob_with_cp,
    )


# prime-rl


@dataclasses.dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclasses.dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


def stand_in_for_prime_rl(monkeypatch) -> None:
    module(monkeypatch, "prime_rl.trainer.rl.loss", LossInputs=LossInputs, LossOutputs=LossOutputs)


def prime_rl_loss(loss, kwargs, logprobs, inference, advantages, masks, weights, scale):
    """The rl component over packed sequences: one call per sequence, and the sum divided by the count of tokens."""
    total, metrics = logprobs[0].sum() * 0.0, []
    for i, mask in enumerate(masks):
        done = loss(
            LossInputs(logprobs[i], inference[i], None, advantages[i], mask, None if weights is None else weights[i]),
            **kwargs,
        )
        assert done.loss.dim() == 0 and all(value.dim() == 0 for value in done.metrics.values())
        total, metrics = total + done.loss, [*metrics, done.metrics]
    return total / scale, metrics
