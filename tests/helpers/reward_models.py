"""A tiny reward model in a folder: a character-level Llama that scores, with random weights."""

from pathlib import Path

import torch
from transformers import LlamaForSequenceClassification

from sparse_rl.models import tiny_tokenizer
from sparse_rl.models.tiny import tiny_config

CHAT = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"


def make_reward_model(folder: Path, chat: bool = False, labels: int = 1, seed: int = 0, **settings) -> str:
    config = tiny_config(2, 64, 2)
    config.num_labels = labels
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model, tokenizer = LlamaForSequenceClassification(config), tiny_tokenizer()
    torch.nn.init.normal_(model.score.weight, std=1.0)  # so that scores differ
    tokenizer.chat_template = CHAT if chat else None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
