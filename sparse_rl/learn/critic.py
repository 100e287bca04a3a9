"""The critic for PPO: estimates the value of the state before every token, in fp32.

    trunk       a head on the policy's hidden states: takes hardly any memory, but the value loss also trains the policy
    separate    a copy of the starting model with its own head: twice the memory, and the two do not affect each other

Both see what the policy's view sees. Values start at 0. The critic is not part of the model that is sampled from,
saved and exported; a run's checkpoints hold its weights with the optimizer's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..models.logits import head_of
from .score import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Critic(nn.Module):
    def __init__(self, policy: PreTrainedModel, trunk: PreTrainedModel | None = None):
        """`trunk`: a separate model, whose token head is not trained; None: use the policy's states"""
        super().__init__()
        self.trunk = trunk
        head = None if trunk is None else head_of(trunk)
        if trunk is not None and head is not None and head.weight is not trunk.get_input_embeddings().weight:
            head.requires_grad_(False)
        hidden = policy.config.get_text_config(decoder=True).hidden_size
        device = next(policy.parameters()).device
        # One-dimensional, like biases, so that no weight decay pulls values to 0.
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, states, tokens: Tensor, target_mask: Tensor, replay: Replay | None = None) -> Tensor:
        """fp32 [B, T]: the values of the states before the target tokens, 0 elsewhere. Differentiable.

        states: the policy's, from `hidden_states`; a separate trunk computes its own from tokens [B, T] and the replay
        """
        if self.trunk is not None:
            states = hidden_states(self.trunk, tokens, replay)
        before = states.last_hidden_state[:, :-1][target_mask[:, 1:]]  # [n, hidden]
        values = before.to(self.weight.dtype) @ self.weight + self.bias
        return values.new_zeros(tokens.shape).masked_scatter(target_mask, values)
