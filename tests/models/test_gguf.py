"""A GGUF file is a model as any other: its weights, its tokens, its end of turn, through training and export."""

import json

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl import load_model
from sparse_rl.models.stops import end_token, stop_ids
from tests.helpers.runs import run
from tests.models.test_stops import SMOLLM2

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'sparse-rl[gguf]'")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # SmolLM2's
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=len(TOKENS), tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys as GGUF has them: the two halves of a head's rotation alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model: LlamaForCausalLM, kind: gguf.GGMLQuantizationType) -> None:
    """The model as a file; matrices are stored as `kind`."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(SMOLLM2)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            rest = rest.removesuffix(".weight")
            array = permuted(array, heads[rest]) if rest in heads else array
            stored = f"blk.{layer}.{NAMES[rest]}.weight"
        else:
            stored = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
                name
            )
        if stored is None:  # the tied output layer
            continue
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("kind", "within"), [("F32", 1e-6), ("Q8_0", 0.02), ("Q4_1", 0.3)])
def test_the_weights_are_those_of_the_file(tmp_path, kind, within):
    model = make_llama()
    write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType[kind])
    loaded, _ = load_model(str(tmp_path / "model.gguf"), dtype="float32")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        gap = (loaded(tokens).logits - model(tokens).logits).abs().max() / model(tokens).logits.abs().max()
    assert gap < within


def test_the_end_of_a_turn_is_one_token_for_all(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_llama(), gguf.GGMLQuantizationType.Q8_0)
    model, tokenizer = load_model(str(tmp_path / "model.gguf"))
    assert stop_ids(model, tokenizer) == (2,) and end_token(model, tokenizer) == 2 == tokenizer.eos_token_id
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi there"}], tokenize=False)
    assert tokenizer.decode(tokenizer(chat).input_ids) == chat and "<|im_end|>" in chat


@pytest.mark.filterwarnings("error:Could not find a config file")  # peft, when it looks for the base's
def test_a_file_is_trained_resumed_evaluated_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "model.gguf", make_llama(), gguf.GGMLQuantizationType.Q4_1)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "model": {"name": "model.gguf"},
        "task": {"name": "math", "files": "problems.jsonl", "prompt": "question", "answer": "answer",
                 "solution": "answer", "holdout": 3, "template": "chat"},
        "rollout": {"compressor": "rkv", "budget": 24, "interval": 8, "rows": 4, "prompts": 2, "group_size": 2,
                    "max_new_tokens": 12, "compressor_options": {"protect_prompt": False}},
        "learn": {"method": "shadow", "minibatches": 1},
        "warmup": {"steps": 2, "batch": 2},
        "eval": {"every": 0, "prompts": 2},
        "run": {"steps": 1, "checkpoint_every": 1},
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(sections))
    bench = [
        "--bench", "math", "--math.files", "problems.jsonl", "--math.prompt", "question", "--math.answer", "answer",
        "--math.holdout", 3, "--template", "chat", "--limit", 2, "--max-new-tokens", 8,
    ]  # fmt: skip
    steps = [
        ["plan", "--recipe", "mine.yaml", "--gpu-memory", 8],
        ["warmup", "mine.yaml", "--out", "warm", "--no-eval"],
        ["train", "mine.yaml", "--out", "whole", "--model.name", "warm"],
        ["train", "mine.yaml", "--out", "adapters", "--model.lora_rank", 2],
        ["train", "adapters", "--resume", "--run.steps", 2],
        ["eval", "whole", *bench],
        ["export", "adapters", "--merge", "--to", "merged"],
        ["eval", "merged", *bench],
    ]
    for command in steps:
        done = run(*command)
        assert done.returncode == 0, done.stderr
    for folder in ("warm", "merged", "whole/checkpoints/step-000001"):
        model, tokenizer = load_model(folder)
        assert stop_ids(model, tokenizer) == (2,)
