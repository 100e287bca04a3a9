"""Peers that may live in another Python: what it lacks, and vLLM's rollouts of a model with random weights.

    python benchmarks/peers.py --config FOLDER --out vllm.json --rows 256 --prompt 256 --new 1024 \\
        --kv-cache-dtype fp8                                     # in the Python that has vLLM; other scripts call it

FOLDER holds a config.json. All rows are asked for at once, with prompts of random ids and exactly so many new tokens,
at temperature 1, with the log-probs of sampled tokens; a short rollout of as many rows goes before. vLLM's cache is
dense, in the model's dtype or in fp8.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = {  # one process, nothing downloaded; the flash kernels that come with it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
}  # fmt: skip
SERVER = {name: VLLM[name] for name in ("VLLM_NO_USAGE_STATS", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ATTENTION_BACKEND")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the peers are."""
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with vLLM (and TRL)")
    parser.add_argument("--peer-path", help="a folder that holds them, for its PYTHONPATH")


def environment(path: str | None) -> dict[str, str]:
    paths = [part for part in (path, str(ROOT), os.environ.get("PYTHONPATH")) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def missing(python: str, path: str | None, modules: Sequence[str]) -> str | None:
    """The first of some modules that an interpreter does not have; OSError or ValueError if it does not run."""
    ask = f"import importlib.util as u, json; print(json.dumps([m for m in {list(modules)} if u.find_spec(m) is None]))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, env=environment(path))
    if done.returncode:
        raise ValueError(f"{python} does not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return next(iter(json.loads(done.stdout.splitlines()[-1])), None)


def left_out(python: str, path: str | None, modules: Sequence[str]) -> str | None:
    """Why a peer cannot be measured, in a sentence."""
    try:
        lacks = missing(python, path, modules)
    except (OSError, ValueError) as error:
        return f"{error}; name an interpreter with --peer-python."
    return lacks and f"{python} has no {lacks}; name one that has with --peer-python or --peer-path."


def write_config(config, folder: Path) -> None:
    """With the class that a config has here, which vLLM looks for."""
    from transformers import AutoModelForCausalLM

    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def vllm_rollout(
    args: argparse.Namespace, folder: Path, rows: int, prompt: int, new: int, kv: str = "auto", minutes: float = 6.0
) -> dict:
    """tokens_per_s and seconds of such a rollout, or `error`. args: of add_options"""
    if why := left_out(args.peer_python, args.peer_path, ("vllm",)):
        return {"error": f"vLLM is left out: {why}"}
    out, log = folder / f"vllm-{rows}-{kv}.json", folder / f"vllm-{rows}-{kv}.log"
    out.unlink(missing_ok=True)
    command = [args.peer_python, str(Path(__file__).resolve()), "--config", str(folder), "--out", str(out)]
    command += ["--rows", str(rows), "--prompt", str(prompt), "--new", str(new), "--kv-cache-dtype", kv]
    try:
        with log.open("w") as file:
            subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=60 * minutes,
                env=environment(args.peer_path) | VLLM, check=True,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"vLLM took more than {minutes:g} minutes ({log})"}
    except subprocess.CalledProcessError as error:
        last = (log.read_text(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return {"error": f"vLLM failed: {last} ({log})"}
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    args = parser.parse_args()

    import vllm

    vocabulary = json.loads((args.config / "config.json").read_text())["vocab_size"]
    model = vllm.LLM(
        model=str(args.config), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=args.rows,
        max_model_len=args.prompt + args.new, gpu_memory_utilization=args.memory, enable_prefix_caching=False,
        kv_cache_dtype=args.kv_cache_dtype,
    )  # fmt: skip
    draw = random.Random(0)

    def rollout(new: int) -> tuple[float, int]:
        prompts = [
            {"prompt_token_ids": [draw.randrange(1, vocabulary) for _ in range(args.prompt)]} for _ in range(args.rows)
        ]
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        start = time.perf_counter()
        done = model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, sum(len(one.outputs[0].token_ids) for one in done)

    rollout(min(args.new, 64))
    seconds, tokens = rollout(args.new)
    found = {"tokens_per_s": tokens / seconds, "seconds": seconds, "rows": args.rows, "new": args.new}
    found |= {"prompt": args.prompt, "kv_cache_dtype": args.kv_cache_dtype, "vllm": vllm.__version__}
    args.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
