"""What a user types and sees."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparse_rl import COMPRESSORS, load_model, read_trajectories, token_logprobs
from tests.helpers.runs import run

COMMAND = [sys.executable, "-c", "from sparse_rl.cli import main; main()"]


def test_help_does_not_import_torch():
    code = "import sys; from sparse_rl.cli import main\ntry: main()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "rollout" in done.stdout, done.stderr


def test_list_compressors():
    done = run("list", "compressors")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*COMPRESSORS, "beacon:N", "kvpress:X"]
    misspelt = run("list", "compresors")
    assert misspelt.returncode == 1 and "did you mean 'compressors'" in misspelt.stderr


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "3+4="}\n\n{"tokens": [5, 6, 7]}\n{"tokens": null, "prompt": "Zw\u00f6lf\u2028\\n"}\n',
        encoding="utf-8",
    )
    return path


def test_rollout_writes_text_and_traces_that_replay(tmp_path, prompts):
    out = tmp_path / "out"
    options = ["--budget", 16, "--interval", 8, "--group-size", 2, "--max-new-tokens", 40, "--rows", 3]
    done = run("rollout", "tiny", "--prompts", prompts, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    assert "6 trajectories" in done.stdout and "KV bytes saved" in done.stdout
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    first = next(line for line in lines if (line["prompt_index"], line["sample_index"]) == (0, 0))
    assert first["prompt"] == "3+4=" and isinstance(first["text"], str)
    model, tokenizer = load_model("tiny")
    assert tokenizer.decode(first["tokens"][:4]) == "3+4="
    trajectories = list(read_trajectories(out))
    assert len(trajectories) == 6
    with torch.no_grad():
        for t in trajectories:
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
            assert gap[t.num_prompt_tokens :].abs().max() < 1e-4
    again = run("rollout", "tiny", "--prompts", prompts, "--out", out)
    assert again.returncode == 1 and "exists already" in again.stderr and "Traceback" not in again.stderr


def test_rollout_of_a_saved_model(tmp_path, prompts):
    model, tokenizer = load_model("tiny", seed=3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = run("rollout", tmp_path / "model", "--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", 5)
    assert done.returncode == 0, done.stderr


def test_chat_template(tmp_path):
    from sparse_rl.errors import SparseRLError
    from sparse_rl.models import encode, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    with pytest.raises(SparseRLError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert tokenizer.decode(encode(tokenizer, [{"role": "user", "content": "hi"}])) == "[hi]>"
    assert tokenizer.decode(encode(tokenizer, "hi")) == "hi"


def test_an_interrupt_keeps_what_was_finished(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n' * 2000)
    out = tmp_path / "out"
    options = ["--rows", "4", "--max-new-tokens", "64", "--budget", "16", "--interval", "8"]
    process = subprocess.Popen(
        [*COMMAND, "rollout", "tiny", "--prompts", str(prompts), "--out", str(out), *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    lines = out / "trajectories.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished trajectories are saved" in errors and "Traceback" not in errors, (
        errors
    )
    saved = list(read_trajectories(out))
    assert 3 <= len(saved) < 2000
    assert f"the {len(saved)} finished" in errors


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompts"),
        ("{nonsense}\n", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"question": "b"}\n', r"line 2 has no text 'prompt'.*(it has: question).*--field"),
        ('{"tokens": ["x"]}\n', r"line 1 has no text 'prompt' and no list of token ids"),
        ("[1, 2]\n", "line 1 is not an object but list"),
        ('{"tokens": [500]}\n', "token id 500, outside the vocabulary"),
    ],
)
def test_bad_prompt_files(tmp_path, text, message):
    import re

    path = tmp_path / "p.jsonl"
    path.write_text(text)
    done = run("rollout", "tiny", "--prompts", path, "--out", tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()  # a refused call leaves nothing behind
    assert re.search(message.replace("(it", r"\(it").replace("question)", r"question\)"), done.stderr)
    missing = run("rollout", "tiny", "--prompts", tmp_path / "none.jsonl")
    assert missing.returncode == 1 and "there is no file" in missing.stderr


def test_plan_from_the_config_alone():
    done = run(
        "plan",
        "--model",
        "qwen2.5-1.5b",
        "--max-new-tokens",
        4096,
        "--prompt-tokens",
        256,
        "--gpu-memory",
        80,
        "--json",
    )
    plan = json.loads(done.stdout)
    layers, heads, dim = 28, 2, 128
    assert plan["kv_bytes_per_token"] == layers * heads * dim * 2 * 2
    assert plan["row_bytes"] == 640 * layers * heads * (dim * 2 * 2 + 4) + layers * 12 * 8 * dim * 2
    assert plan["trace_row_bytes"] == layers * heads * (4096 + 256) * 2
    assert plan["weight_bytes"] == pytest.approx(1_543_714_304 * 2)  # the published parameter count, in bf16
    assert plan["rows_that_fit"] > 5 * plan["dense_rows_that_fit"]
    shown = run("plan", "--model", "qwen2.5-7b", "--rows", 4096, "--gpu-memory", 40)
    for word in ("weights", "KV per row, dense", "KV per row, rkv", "rows that fit", "trace per row", "use rows="):
        assert word in shown.stdout
    for arguments in (["--gpu-memory", "-3"], ["--gpu-memory", "nan"], ["--dtype", "flaot32"]):
        refused = run("plan", "--model", "tiny", *arguments)
        assert refused.returncode == 1 and "Traceback" not in refused.stderr
    wrong = run("plan", "--model", "qwen2.5-1.6b")
    assert wrong.returncode == 1 and "qwen2.5-1.5b" in wrong.stderr and "Traceback" not in wrong.stderr


def test_plan_grows_with_rows_and_budget():
    from sparse_rl.compressors import make
    from sparse_rl.models import ModelShape, shape_config
    from sparse_rl.planning.memory import make_plan

    shape = ModelShape.of(shape_config("qwen2.5-1.5b"))

    def plan(rows, budget):
        bound = make("rkv").bind(budget, 128)
        return make_plan(shape, bound, rows=rows, prompt_tokens=256, new_tokens=4096, weight_bytes=3 * 2**30)

    memory = 40 * 2**30
    fits = plan(1, 512).rows_that_fit(memory)
    assert plan(fits, 512).total_bytes <= memory * 0.95 < plan(fits + 1, 512).total_bytes
    assert plan(1, 1024).rows_that_fit(memory) < fits
    sentence = plan(1, 10**8).largest_that_fits(memory)
    budget = int(sentence.rsplit("use budget=", 1)[1].rstrip("."))
    assert plan(1, budget).rows_that_fit(memory) == 1 and plan(1, budget + 1).rows_that_fit(memory) == 0
    assert "smaller model" in plan(1, 512).largest_that_fits(2**30)
    dense, h2o = (
        make_plan(shape, make(name).bind(512, 128), rows=8, prompt_tokens=9000, new_tokens=100, weight_bytes=3 * 2**30)
        for name in ("dense", "h2o")
    )
    assert h2o.dense_rows_that_fit(memory) == pytest.approx(
        dense.rows_that_fit(memory), rel=0.02
    )  # ours hold feed indices and traces too
    short = make_plan(
        shape, make("rkv").bind(512, 128), rows=64, prompt_tokens=1, new_tokens=100, weight_bytes=3 * 2**30
    )
    assert short.rows_that_fit(8 * 2**30) > 50


def test_lists_and_plans_for_training(tmp_path):
    tasks, presets, keys = (run("list", what) for what in ("tasks", "presets", "keys"))
    assert all(done.returncode == 0 for done in (tasks, presets, keys))
    assert "countdown" in tasks.stdout and "gym:NAME" in tasks.stdout
    assert "reject_below 0.0001, cap 2.0" in presets.stdout and "rollout.budget" in keys.stdout
    recipe = Path(__file__).parent.parent.parent / "recipes" / "qwen2.5-1.5b-simplerl.yaml"
    done = run("plan", "--recipe", recipe, "--gpu-memory", 80)
    assert done.returncode == 0 and "optimizer: fp32 masters" in done.stdout and "fits" in done.stdout
    fewer = run("plan", "--recipe", recipe, "--rows", 3, "--budget", 64)
    assert "cache, 3 rows" in fewer.stdout and "budget 64 + interval 128" in fewer.stdout
    both = run("plan", "--recipe", recipe, "--model", "tiny")
    assert both.returncode == 1 and "give --model for a rollout or --recipe" in both.stderr


def test_training_mistakes_get_a_sentence(tmp_path):
    recipe = Path(__file__).parent.parent.parent / "recipes" / "tiny-sums.yaml"
    for args, message in [
        (["train", tmp_path / "none.yaml"], "there is no recipe"),
        (["train", recipe, "budget"], "'budget' is not a key"),
        (["train", recipe, "--budget"], "--budget has no value"),
        (["train", recipe, "--bugdet", 3], "did you mean 'rollout.budget'"),
        (["train", recipe, "--task.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["train", recipe, "--task.count", '"8"'], "the task sums cannot use the options"),
        (["train", recipe, "--rollout.compressor_options.window", "a"], "rkv"),
        (
            ["train", recipe, "--rollout.compressor_options.snks", 3],
            "rkv has no parameter 'snks'; did you mean 'sinks'",
        ),
        (["train", recipe, "--compressor", "rvk"], "did you mean 'rkv'"),
        (["train", recipe, "--model.name", "tinny-sums"], "cannot load 'tinny-sums'"),
        (["train", recipe, "--stop", "[<end>]"], "'<end>', which is not a token"),
        (["warmup", recipe, "--out", tmp_path], "exists already"),
        (["train", recipe, "--resume", "--out", tmp_path / "no"], "there is no recipe"),
    ]:
        done = run(*args, *(["--out", tmp_path / "out"] if "--out" not in args else []))
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, (args, done.stderr)
        assert not (tmp_path / "out").exists()


def test_bench_rollout():
    options = [
        "--model-shape",
        "tiny",
        "--rows",
        "4",
        "--budget",
        "24",
        "--interval",
        "8",
        "--prompt",
        "10",
        "--new",
        "40",
        "--device",
        "cpu",
    ]
    result = json.loads(
        run(
            "bench", "rollout", *options, "--repeats", "2", "--peer", "transformers", "--peer-new", "4", "--json"
        ).stdout
    )
    assert result["steps"] == 39 and len(result["seconds_all"]) == 2
    assert result["tokens_per_s"] == pytest.approx(4 * 40 / result["seconds"])
    assert result["kv_bytes"] == result["kv_bytes_planned"] < result["kv_bytes_dense"]
    assert sum(result["share"].values()) == pytest.approx(1, abs=0.05)
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["peer_tokens_per_s"])
    assert "tokens/s, end to end" in run("bench", "rollout", *options, "--repeats", "1", "--compressor", "dense").stdout
    for wrong, message in (
        ("--peer", "there is no peer 'qwen9'"),
        ("--model-shape", "no model 'qwen9'"),
        ("--rows", "Invalid value"),
    ):
        refused = run("bench", "rollout", wrong, "qwen9")
        assert refused.returncode > 0 and message in refused.stderr and "Traceback" not in refused.stderr
