"""Training steps of newer architectures at their published sizes, with random weights, on one GPU: rollout tokens/s,
seconds by stage, and peak memory against the plan.

    python benchmarks/new_models_gpu.py                                  # all four, one JSON line each
    python benchmarks/new_models_gpu.py gemma-3-4b --minutes 6 --lines runs/new-models.jsonl
    python benchmarks/new_models_gpu.py qwen3-30b-a3b --own-experts      # experts by our product, not by torch's
    python benchmarks/new_models_gpu.py gemma-3-4b --vllm --peer-python OTHER/bin/python   # and vLLM's rollout
    python benchmarks/new_models_gpu.py --tiny                           # small sizes: does everything run?

gpt-oss-20b and Qwen3-30B-A3B train adapters of their linear layers, which are those of attention (experts are no linear
layers); the hybrid of about 4B (Qwen3.5's layers) and Gemma 3 4B train all weights. Every model runs in a process of
its own with a limit on its time, so one that fails or hangs costs one line, which then holds `error`. With --vllm a
line also holds vLLM's rollout of the same config, rows and lengths on its dense cache, or why there is none. Weights
are made in bf16 on the device, and no checkpoint is written: one of 4B takes 55 GB. Rewards are planted: every second
completion is right. The first step also captures and compiles; `steady` is the last one that ended in time. With
--lines FILE a model that the file has is not measured again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import peers
from stay import provenance

from sparse_rl.tasks import Grade, Prompt
from sparse_rl.tasks.sums import Sums

HERE = Path(__file__).resolve()
SHAPES: dict[str, dict] = {
    "gpt-oss-20b": dict(
        model_type="gpt_oss", num_hidden_layers=24, hidden_size=2880, intermediate_size=2880, num_local_experts=32,
        num_experts_per_tok=4, num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
        vocab_size=201088,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
    ),
    "qwen3.5-4b-like": dict(
        model_type="qwen3_5_text", num_hidden_layers=32, hidden_size=2560, intermediate_size=9216,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        vocab_size=248320, tie_word_embeddings=True,
    ),
    "gemma-3-4b": dict(
        model_type="gemma3_text", num_hidden_layers=34, hidden_size=2560, intermediate_size=10240,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024, vocab_size=262208,
    ),
}  # fmt: skip
TINY = {"rows": 8, "prompt": 16, "new": 24, "budget": 28, "interval": 4, "micro_batch_tokens": 512}
FEW = {
    **{"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 32, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
ADAPTED = {"gpt-oss-20b", "qwen3-30b-a3b"}


class PlantedSums(Sums):
    """Sums of which every second completion counts as right, so that advantages are not all zero."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        return [Grade(float(i % 2), text) for i, text in enumerate(texts)]


def config_of(name: str, tiny: bool):
    from transformers import AutoConfig

    settings = dict(SHAPES[name])
    if tiny:
        settings |= {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256}
        settings |= {key: value for key, value in FEW.items() if key in settings}
    return AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="float32" if tiny else "bfloat16")


def in_vllm(name: str, args: argparse.Namespace) -> dict:
    """The same rollout by vLLM, in a process of its own, after ours."""
    with tempfile.TemporaryDirectory() as folder:
        peers.write_config(config_of(name, args.tiny), Path(folder))
        return peers.vllm_rollout(args, Path(folder), args.rows, args.prompt, args.new, minutes=args.minutes)


def measure(name: str, args: argparse.Namespace) -> None:
    """One model, in this process: a line after every step, the last of which has all of it."""
    import torch

    from sparse_rl import tasks
    from sparse_rl.config import load_recipe
    from sparse_rl.files import read_lines
    from sparse_rl.kernels import ops
    from sparse_rl.models import encode, load_config, recurrent_kernels, tiny_tokenizer
    from sparse_rl.train.loop import Trainer
    from sparse_rl.train.run import plan_run, settle

    if args.own_experts:
        ops.RULES["cuda"] = replace(ops.RULES["cuda"], own_experts=(torch.float32, torch.float16, torch.bfloat16))
    with tempfile.TemporaryDirectory() as folder:
        config_of(name, args.tiny).save_pretrained(folder)
        keys = {
            "model.name": f"random:{folder}",
            "model.lora_rank": 16 if name in ADAPTED else 0,
            "model.gradient_checkpointing": "true",
            "task.name": f"{HERE}:PlantedSums",
            "task.count": args.prompt // 2,
            "rollout.budget": args.budget,
            "rollout.interval": args.interval,
            "rollout.rows": args.rows,
            "rollout.prompts": args.rows // 8,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": args.new,
            "rollout.stop": "[]",
            "learn.method": args.method,
            "learn.micro_batch_tokens": args.micro_batch_tokens,
            "eval.every": 0,
            "run.steps": args.steps,
            "run.checkpoint_every": 10 * args.steps,
        }
        recipe = load_recipe("tiny-sums", [(key, str(value)) for key, value in keys.items()])
        task, tokenizer = tasks.make(recipe.task.name, **recipe.task.options), tiny_tokenizer()
        prompts = task.sample(0, recipe.rollout.prompts * args.steps)
        plan = plan_run(recipe, max(len(encode(tokenizer, p.text)) for p in prompts))
        run = Path(folder) / "run"
        run.mkdir()
        start = time.perf_counter()
        trainer = Trainer(recipe, run, show=False, settle=partial(settle, 1))
        line = {
            "model": name,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": provenance(),
            "recurrent_layers": recurrent_kernels(load_config(folder)),
            "rows": args.rows,
            "new_tokens": args.new,
            "slots": [args.budget, args.interval],
            "method": args.method,
            "adapters": name in ADAPTED,
            "own_experts": args.own_experts,
            "made_seconds": time.perf_counter() - start,
        }
        for _ in range(args.steps):
            trainer.step()
            timing, metrics = (read_lines(run / f"{part}.jsonl") for part in ("timing", "metrics"))
            peak = max(line.get("memory/peak_bytes", 0) for line in timing)
            line |= {
                "steps": len(timing),
                "seconds": time.perf_counter() - start,
                "first": stages(timing[0]),
                "steady": stages(timing[-1]),
                "rollout_tokens_per_s": timing[-1]["rollout/tokens_per_s"],
                "peak_bytes": peak,
                "planned_bytes": plan.total_bytes,
                "peak_of_plan": peak / plan.total_bytes,
                "gap": {key: value for key, value in metrics[-1].items() if key.startswith("gap/")},
            }
            print(json.dumps(line), flush=True)  # so that a limit on its time costs later steps alone
        trainer.source.close()
        trainer.log.close()
        trainer.task.close()


def stages(line: dict) -> dict[str, float]:
    return {key.removeprefix("time/"): value for key, value in line.items() if key.startswith("time/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHAPES)}; all, if none is given")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each model, at most")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="tokens, about")
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--method", default="sparse-rl")
    parser.add_argument("--own-experts", action="store_true", help="decode experts by our product in bf16, too")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script")
    parser.add_argument("--lines", type=Path, help="also append the lines to this file")
    parser.add_argument("--vllm", action="store_true", help="beside vLLM's rollout")
    peers.add_options(parser)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        parser.error(f"there is no {unknown[0]}; the models are {', '.join(SHAPES)}")
    if args.here:
        measure(args.models[0], args)
        return
    known, failed = measured(args.lines, args.vllm), []
    for name in args.models or SHAPES:
        if name in known:
            print(f"{name}: measured before", flush=True)
            continue
        given = [x for x in sys.argv[1:] if x not in SHAPES]
        command = [sys.executable, str(HERE), name, *given, "--here"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * args.minutes)
            sys.stderr.write(done.stderr[-4000:])
            said, why = done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1]
            whole = done.returncode == 0
        except subprocess.TimeoutExpired as error:
            said, why, whole = error.stdout or "", f"took more than {args.minutes:g} minutes", False
        line = last_line(said if isinstance(said, str) else said.decode(errors="replace"))
        if line is None or not whole:
            line = json.dumps({"model": name, **json.loads(line or "{}"), "error": why})
        if args.vllm:
            line = json.dumps({**json.loads(line), "vllm": in_vllm(name, args)})
        failed += [name] if has_error(json.loads(line)) else []
        print(line, flush=True)
        if args.lines:
            args.lines.parent.mkdir(parents=True, exist_ok=True)
            with args.lines.open("a") as file:
                file.write(line + "\n")
    if failed:
        sys.exit(f"new_models_gpu: failed: {', '.join(failed)}")


def last_line(said: str) -> str | None:
    """The newest JSON of a model's process."""
    return next((line for line in reversed(said.splitlines()) if line.startswith('{"model"')), None)


def has_error(line: dict) -> bool:
    """Whether a model, or vLLM where there is one, failed."""
    peer = line.get("vllm", {}).get("error", "")
    return "error" in line or (peer != "" and "left out" not in peer)


def measured(lines: Path | None, vllm: bool) -> set[str]:
    """Models that a file of lines has already."""
    if lines is None or not lines.exists():
        return set()
    whole = [line for line in map(json.loads, lines.read_text().splitlines()) if not has_error(line)]
    return {line["model"] for line in whole if not vllm or "tokens_per_s" in line.get("vllm", {})}


if __name__ == "__main__":
    main()
