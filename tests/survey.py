"""Every causal LM of the installed transformers, tiny and random: is it exact here, refused, wrong, or does it crash?

    make survey                                              # all of them, and docs/architectures.md
    python tests/survey.py llama gpt_oss                     # some
    python tests/survey.py --write docs/architectures.md

    exact      greedy rollouts on a dense cache are those of `generate`, and rollouts on a dense and on evicting caches
               (R-KV, window) have the log-probs of the learner under their trace, within 1e-4 in fp32
    refused    one sentence says why, before a token is sampled; `late`: only afterwards
    wrong      log-probs differ
    crash      any other exception
    not built  transformers itself makes no tiny model of it, or that model computes nothing finite

Every type runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.learn.score import token_logprobs

KINDS = ("exact", "refused", "late", "wrong", "crash", "not built")
EXACT = 1e-4  # nats
SECONDS = 240
VOCABULARY = 61

# By the names that configs have for sizes; a config takes those that it has.
SIZES = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "ffn_hidden_size", "dim_ff"),
        64,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size", "moe_shared_size"), 32
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "kv_channels"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention_size"), 24),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_n_groups": 1, "n_groups": 1, "mamba_d_ssm": 64, "mamba_chunk_size": 16, "chunk_size": 16,
    "rotary_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2, "word_embed_proj_dim": 32, "project_dim": 32, "laurel_rank": 8, "pad_token_id": 0,
    "is_decoder": True,
    "add_cross_attention": False, "use_cache": True, "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
# What the sizes above do not settle.
OWN: dict[str, dict] = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"],
        "time_step_min": 1e-9,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    **{
        key: {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            **{"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        }
        for key in ("gemma4_text", "gemma4_unified_text")
    },
    "mimo_v2_flash": {"v_head_dim": 6},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    **{key: {"head_dim": 8} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
        **{"indexer_compress_ratio": 4, "hc_lowrank": 8, "hc_count": 2},
    },
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "llama4_text": {"attention_chunk_size": 256},
}
_NONE = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Finding:
    type: str
    model: str
    kind: str  # one of KINDS
    why: str = ""
    gap: float = 0.0  # nats, the largest


def tiny_config(kind: type[PreTrainedConfig], own: dict) -> PreTrainedConfig:
    """A config of small sizes, with those of its sub-configs."""
    usual = kind()
    given: dict = {name: None for name in _NONE}
    for name, value in SIZES.items():
        with contextlib.suppress(RuntimeError):  # which differs from layer to layer, and stays as it is
            settable = not isinstance(getattr(kind, name, None), property) or getattr(kind, name).fset is not None
            if (
                settable
                and getattr(usual, name, None) is not None
                and not isinstance(getattr(usual, name), (list, dict))
            ):
                given[name] = value
    if getattr(usual, "kv_lora_rank", None) is not None:  # one latent for all heads
        given |= {"num_key_value_heads": 4, "head_dim": 8}
    given |= own
    for name, part in getattr(kind, "sub_configs", {}).items():
        inner = getattr(usual, name, None)
        if isinstance(inner, PreTrainedConfig):
            given[name] = tiny_config(type(inner), OWN.get(inner.model_type, {})).to_dict()
        del part
    try:
        return kind(**given)
    except Exception:  # some must have them
        return kind(**{**given, "bos_token_id": 1, "eos_token_id": VOCABULARY - 1})


def tiny_model(type_name: str) -> transformers.PreTrainedModel:
    config = tiny_config(CONFIG_MAPPING[type_name], OWN.get(type_name, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and weight is not None and weight.dim() == 2:
                weight.normal_(std=0.25)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def plain_logprobs(model, tokens: torch.Tensor) -> torch.Tensor:
    """By the model's own forward pass, with a mask and positions of its own making. [T]; 0 for the first token"""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def generated(model, prompt: list[int], new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `generate` of transformers finds most likely, and its log-probs. [new], [new]"""
    done = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), forced_eos_token_id=None,
    )  # fmt: skip
    tokens = done.sequences[0, len(prompt) :]
    logits = torch.stack([step[0].float() for step in done.logits])
    return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@torch.no_grad()
def examine(type_name: str) -> Finding:
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type_name])
    try:
        model = tiny_model(type_name)
        if not torch.isfinite(plain_logprobs(model, torch.tensor(prompts(20)[0]))).all():
            return Finding(type_name, name, "not built", "its forward pass is not finite")
    except Exception as error:  # whatever a constructor of transformers raises
        return Finding(type_name, name, "not built", _short(error))
    worst, sampled, stage = 0.0, False, "rollout"
    try:
        stage = "rollout (greedy)"
        engine = Engine(model, compressor="dense", rows=4)
        (greedy,) = engine.generate(prompts(12), 1, Sampling(16, 0.0))
        try:
            tokens, logprobs = generated(model, prompts(12)[0], 16)
        except Exception as error:  # of transformers
            return Finding(type_name, name, "not built", f"generate: {_short(error)}")
        same = torch.equal(greedy.response_tokens, tokens)
        worst = (greedy.sampler_logprobs[greedy.num_prompt_tokens :] - logprobs).abs().max().item() if same else 9.9
        if not worst < EXACT:
            return Finding(type_name, name, "wrong", f"generate finds other tokens or log-probs, by {worst:.2g}", worst)
        for compressor in ("dense", "rkv", "window"):
            sampled, stage = False, f"rollout ({compressor})"
            engine = Engine(model, compressor=compressor, budget=16, interval=6, rows=4)
            trajectories = engine.generate(prompts(5, 30), 2, Sampling(40, 1.0, stop_ids=()), seed=3)
            sampled, stage = True, f"log-probs ({compressor})"
            for t in trajectories:
                trace = None if compressor == "dense" else t.trace
                if trace is not None and not (trace.evicted_at.long() < len(t.tokens)).any():
                    return Finding(type_name, name, "wrong", f"{compressor} evicts nothing")
                logprobs = token_logprobs(model, t.tokens, trace)
                gap = (logprobs.cpu() - t.sampler_logprobs)[t.num_prompt_tokens :].abs().max().item()
                worst = max(worst, gap)
                if not gap < EXACT:
                    return Finding(type_name, name, "wrong", f"{stage} differ by {gap:.2g}", gap)
    except SparseRLError as error:
        return Finding(type_name, name, "late" if sampled else "refused", _short(error), worst)
    except Exception as error:  # a crash is what this looks for
        return Finding(type_name, name, "crash", f"{stage}: {_short(error)}", worst)
    return Finding(type_name, name, "exact", "", worst)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, SparseRLError) else f"{type(error).__name__}: {text}")[:300]


def _work(type_name: str, sender) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        sender.send(examine(type_name))


def survey(names: list[str]) -> Iterator[Finding]:
    """One process per type: one that hangs or dies takes nobody along."""
    context = multiprocessing.get_context("fork")
    for type_name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(type_name, sender))
        process.start()
        sender.close()
        model = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type_name])
        try:
            found = receiver.recv() if receiver.poll(SECONDS) else Finding(type_name, model, "crash", "hangs")
        except EOFError:
            found = Finding(type_name, model, "crash", "the process died")
        process.kill()
        process.join()
        yield found


def page(findings: list[Finding]) -> str:
    """docs/architectures.md"""
    counts = {kind: sum(f.kind == kind for f in findings) for kind in KINDS}
    lines = [
        "# Architectures",
        "",
        f"Every causal LM of transformers {transformers.__version__} as a tiny random model; `make survey` writes this",
        "page. **Exact** means, within 1e-4 nats in fp32: greedy rollouts on a dense cache are those of `generate`,",
        "and rollouts on a dense and on evicting caches (R-KV, window) have the learner's log-probs under their trace.",
        "",
        "| " + " | ".join(KINDS) + " | all |",
        "|" + "---|" * (len(KINDS) + 1),
        "| " + " | ".join(str(counts[kind]) for kind in KINDS) + f" | {len(findings)} |",
        "",
        *textwrap.wrap(
            "Exact: " + ", ".join(f"`{f.type}`" for f in findings if f.kind == "exact") + ".",
            120,
            break_on_hyphens=False,
        ),
        "",
        "| model type | | why |",
        "|---|---|---|",
    ]
    for kind in KINDS[1:]:
        lines += [f"| `{f.type}` | {kind} | {f.why.replace('|', '/')} |" for f in findings if f.kind == kind]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    findings = []
    for found in survey(names):
        findings.append(found)
        print(f"{found.type:28} {found.kind:10} {found.gap:8.1e}  {found.why}", flush=True)
    print({kind: sum(f.kind == kind for f in findings) for kind in KINDS})
    if args.json:
        args.json.write_text(json.dumps([vars(f) for f in findings], indent=1))
    if args.write:
        args.write.write_text(page(findings))
    sys.exit(any(f.kind in ("wrong", "crash", "late") for f in findings))


if __name__ == "__main__":
    main()
