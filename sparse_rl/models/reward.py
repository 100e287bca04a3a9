"""A reward model: a sequence classifier with one label, whose score says how good a response to a prompt is.

It reads a conversation with its own tokenizer: chat messages and the response through its chat template, if it has one;
otherwise the text of the prompt followed by the response. It is loaded like any model, without running code from its
folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import SparseRLError
from ..files import first_line
from .folder import check_layers, check_size, check_tensors, reading
from .load import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Scores completions. `batch_tokens`: tokens in a forward pass, padding included; a longer text goes alone"""

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_tokens: int = 16384
    ):
        self.name, self.model, self.tokenizer, self.batch_tokens = name, model, tokenizer, batch_tokens
        model.config.use_cache = False  # a score needs no keys and values afterwards
        self.context = context_of(model.config, tokenizer)
        self.vocabulary = len(cast(nn.Embedding, model.get_input_embeddings()).weight)

    @torch.no_grad()
    def scores(self, prompts: Sequence[str | list[dict]], texts: Sequence[str]) -> list[float | None]:
        """The score of every completion; None for one that is longer than the model's context."""
        ids = [self.encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        found: list[float | None] = [None] * len(ids)
        for rows in self._batches([len(row) for row in ids]):
            for row, score in zip(rows, self._forward([ids[row] for row in rows]).tolist(), strict=True):
                found[row] = score
        return found

    def encode(self, prompt: str | list[dict], text: str) -> list[int]:
        """The tokens of a prompt and a response to it."""
        if self.tokenizer.chat_template is not None:
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            return self._fitting(self._through_template([*before, {"role": "assistant", "content": text}]))
        if not isinstance(prompt, str):
            raise SparseRLError(
                f"the prompts are chat messages, but the tokenizer of the reward model {self.name} has no chat "
                "template; use prompts of plain text, or another reward model."
            )
        return self._fitting(self.tokenizer.encode(prompt + text))

    def _through_template(self, messages: list[dict]) -> list[int]:
        try:
            encoded: Any = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise SparseRLError(
                f"the chat template of the reward model {self.name} fails ({type(error).__name__}: "
                f"{first_line(error)[:200]}) on messages of {roles}; use prompts that it takes, or another model."
            ) from error
        return list(encoded["input_ids"])

    def _fitting(self, ids: list[int]) -> list[int]:
        """The ids; refuses them if the model does not have an embedding for each."""
        if (highest := max(ids, default=0)) >= self.vocabulary:
            raise SparseRLError(
                f"the tokenizer of the reward model {self.name} gave the id {highest}, but the model has only "
                f"{self.vocabulary} tokens, so they do not belong together; use another reward model."
            )
        return ids

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows that go through the model together, longest first, without those that are too long.

        Without a padding token the model cannot tell where a text ends, so texts go one by one.
        """
        fitting = [row for row, length in enumerate(lengths) if 0 < length <= self.context]
        order, batches = sorted(fitting, key=lambda row: -lengths[row]), []
        while order:
            count = max(1, self.batch_tokens // lengths[order[0]]) if self.model.config.pad_token_id is not None else 1
            batches.append(order[:count])
            order = order[count:]
        return batches

    def _forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """The scores of some texts. fp32 [rows]"""
        width, pad, device = len(ids[0]), self.model.config.pad_token_id or 0, self.model.device
        tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ids], device=device)
        seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
        return self.model(input_ids=tokens, attention_mask=seen).logits[:, 0].float()


def load_reward_model(name: str, batch_tokens: int = 16384, device: str | None = None) -> RewardModel:
    """The reward model of a folder or a hub id, in the dtype of its files."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward_config(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with reading(name, OTHERS), torch.random.fork_rng(devices=[]):
        check_size(name, AutoModelForSequenceClassification)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_tensors` refuses and names them
            trust_remote_code=False,
        )
        model, info = loaded
        check_tensors(name, info)
    return RewardModel(name, model.to(device).eval().requires_grad_(False), tokenizer, batch_tokens)


OTHERS = "give the hub id or the folder of a sequence classifier."


def reward_config(name: str) -> Any:
    """The config of a reward model; reads no weights."""
    from transformers import AutoConfig

    check_folder(name)
    with reading(name, OTHERS):
        check_layers(name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if generators := [kind for kind in config.architectures or [] if "SequenceClassification" not in kind]:
        raise SparseRLError(f"the reward model {name} is a {generators[0]}, which scores nothing; {OTHERS}")
    if config.num_labels != 1:
        raise SparseRLError(
            f"the reward model {name} has {config.num_labels} labels, but a reward is a single number; use a "
            "classifier with one label."
        )
    return config


def context_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a text may have, by the config and the tokenizer, whose own limit may be astronomical.

    The smaller limit counts: two rows of RoBERTa's table of positions cannot be used.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(positions or tokenizer.model_max_length, tokenizer.model_max_length)
