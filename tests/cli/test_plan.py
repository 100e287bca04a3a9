"""`sparse-rl plan`: the memory of rollouts and runs, and time and cost on many GPUs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.runs import run

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "qwen2.5-1.5b-simplerl.yaml"
SEVEN = ["--model", "qwen2.5-7b"]
MANY = [*SEVEN, "--gpus", 64, "--new", 16384, "--rollout.prompts", 256, "--price", 2]


NUMBERS = ["--model", "qwen2.5-1.5b", "--prompt-tokens", 256, "--json"]
LAYERS, HEADS, DIM = 28, 2, 128  # of qwen2.5-1.5b


def test_plan_from_the_config_alone():
    plan = json.loads(run("plan", *NUMBERS, "--max-new-tokens", 4096, "--gpu-memory", 80).stdout)
    assert plan["kv_bytes_per_token"] == LAYERS * HEADS * DIM * 2 * 2
    assert plan["row_bytes"] == 640 * LAYERS * HEADS * (DIM * 2 * 2 + 4) + LAYERS * 12 * 8 * DIM * 2
    assert plan["trace_row_bytes"] == LAYERS * HEADS * (4096 + 256) * 2
    assert plan["weight_bytes"] == pytest.approx(1_543_714_304 * 2)  # the published parameter count, in bf16
    assert plan["rows_that_fit"] > 5 * plan["dense_rows_that_fit"]


def test_the_plan_of_beacons():
    plan = json.loads(run("plan", *NUMBERS, "--compressor", "beacon:16").stdout)
    assert plan["capacity"] == 256 + 4095 // 16 + 16
    assert plan["row_bytes"] == plan["capacity"] * LAYERS * HEADS * (DIM * 2 * 2 + 4)
    assert (plan["trace_row_bytes"], plan["chunk_row_bytes"]) == (0, 4096 + 24)


def test_the_table_of_a_rollout():
    shown = run("plan", "--model", "qwen2.5-7b", "--rows", 4096, "--gpu-memory", 40).stdout
    for label in ("weights", "KV per row, dense", "KV per row, rkv", "rows that fit", "trace per row", "use rows="):
        assert label in shown


def test_the_table_of_beacons():
    shown = run("plan", "--model", "qwen2.5-1.5b", "--compressor", "beacon:16", "--gpu-memory", 80).stdout
    assert "prompt + a beacon per 16 tokens + a chunk = 783 slots" in shown and "places of beacons per row" in shown
    assert "trace" not in shown and "budget" not in shown and "rows that fit, beacon" in shown


def test_the_plan_of_a_recipe():
    done = run("plan", "--recipe", RECIPE, "--gpu-memory", 80)
    assert done.returncode == 0 and "optimizer: fp32 masters" in done.stdout and "fits" in done.stdout
    fewer = run("plan", "--recipe", RECIPE, "--rows", 3, "--budget", 64).stdout
    assert "cache, 3 rows" in fewer and "budget 64 + interval 128" in fewer


def test_a_model_without_its_option_is_told_which():
    refused = run("plan", "models/mine")
    assert refused.returncode == 1 and "'models/mine' has no option before it; give either --model" in refused.stderr


def test_any_key_of_a_recipe_is_an_option():
    plain = json.loads(run("plan", "--recipe", RECIPE, "--json").stdout)
    keys = ["--lora-rank", 16, "--learn.micro_batch_tokens", 4096, "--loss.beta=0", "--rollout.rows", 8]
    fewer = json.loads(run("plan", "--recipe", RECIPE, *keys, "--json").stdout)
    assert fewer["optimizer_bytes"] < plain["optimizer_bytes"] / 50 and fewer["reference_bytes"] == 0
    assert fewer["update_bytes"] < plain["update_bytes"] and fewer["rollout"]["rows"] == 8
    of_model = json.loads(run("plan", "--model", "qwen2.5-1.5b", "--lora-rank", 16, "--json").stdout)
    assert of_model["optimizer_bytes"] == fewer["optimizer_bytes"]


LARGE = ["--recipe", RECIPE, "--prompt-tokens", 256, "--gradient-checkpointing", "false"]


def fitting_lines(shown: str) -> list[tuple[str, str]]:
    """(options, GiB) of the settings that `plan` says would fit."""
    return re.findall(r"^  (--.*?)  +([\d.]+) GiB: fits$", shown, flags=re.MULTILINE)


def test_what_does_not_fit_is_told_what_would():
    shown = run("plan", *LARGE, "--gpu-memory", 44).stdout
    assert "44.00 GiB: does not fit" in shown and "--learn.micro_batch_tokens 8192" in shown
    found = fitting_lines(shown)
    assert found and "--model.gradient_checkpointing true" in shown
    for options, gib in found:
        if "GPUs" in options:
            continue
        again = json.loads(run("plan", *LARGE, *options.split(), "--gpu-memory", 44, "--json").stdout)
        assert again["fits"] and f"{again['total_bytes'] / 2**30:.2f}" == gib


def test_rows_that_are_suggested_are_the_most():
    recipe = ["--recipe", RECIPE, "--gpu-memory", 40, "--json"]
    settings = json.loads(run("plan", *recipe).stdout)["settings"]
    (rows,) = (s["keys"]["rollout.rows"] for s in settings if "rollout.rows" in s["keys"])
    fits = [json.loads(run("plan", *recipe, "--rows", n).stdout)["fits"] for n in (rows, rows + 1)]
    assert fits == [True, False]


def test_what_fits_only_together_is_said_together():
    small = ["--recipe", "smollm2-countdown", "--model.name", "llama-3.2-1b", "--gpu-memory", 16]
    shown = run("plan", *small).stdout
    ((options, gib),) = fitting_lines(shown)
    assert options.count("--") > 1 and "not enough alone" in shown
    again = json.loads(run("plan", *small, *options.split(), "--json").stdout)
    assert again["fits"] and f"{again['total_bytes'] / 2**30:.2f}" == gib
    assert "use a smaller model" in run("plan", *small[:-1], 2).stdout


def test_the_memory_is_that_of_the_device_that_is_there(monkeypatch):
    device = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: device)
    assert "24.00 GiB: does not fit" in run("plan", "--recipe", RECIPE).stdout
    assert "80.00 GiB: fits" in run("plan", "--recipe", RECIPE, "--gpu-memory", 80).stdout
    assert "rows that fit, dense" in run("plan", "--model", "qwen2.5-1.5b").stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "tiny", "--gpu-memory", "-3"], "it must be a positive number of GiB"),
        (["--model", "tiny", "--gpu-memory", "nan"], "it must be a positive number of GiB"),
        (["--model", "tiny", "--dtype", "flaot32"], "did you mean 'float32'"),
        (["--model", "qwen2.5-1.6b"], "qwen2.5-1.5b"),
        (["--recipe", RECIPE, "--model", "tiny"], "give either --model, to plan a rollout, or --recipe"),
    ],
)
def test_mistakes_get_a_sentence(arguments, message):
    refused = run("plan", *arguments)
    assert refused.returncode == 1 and message in refused.stderr and "Traceback" not in refused.stderr


# ---------------------------------------------------------------------------------------------------- many GPUs


def test_the_numbers_of_many_gpus_agree():
    done = run("plan", *MANY, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu_hours"] == pytest.approx(64 * found["step"] * 100 / 3600)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step"]) and 0 < found["idle"] < 1
    assert found["bytes_per_gpu"] < found["memory"] and found["plan"]["divided_by"] == 64


def test_the_table_of_many_gpus():
    shown = run("plan", *MANY).stdout
    for label in ("a step", "idle", "tokens/s", "memory per GPU", "GPU hours", "cost", "assumptions"):
        assert label in shown


def test_the_table_of_one_gpu_that_samples_ahead():
    shown = run("plan", "--recipe", RECIPE, "--gpus", 1, "--rollout.ahead", 1, "--steps", 7).stdout
    for label in ("7 steps", "if sharing the device gained nothing", "one process"):
        assert label in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*SEVEN, "--gpus", 0], "--gpus is 0; it must be a whole number of at least 1"),
        ([*SEVEN, "--gpus", 256], "rollout.prompts is 128, but all completions of a prompt stay on one of 256 GPUs"),
        (
            [*SEVEN, "--gpus", 8, "--model.shard", "false", "--gpu-memory", 80],
            "divide the learner among them with --model.shard true",
        ),
        ([*SEVEN, "--gpus", 2, "--gpu-memory", 80], "with --model.shard true"),
        (["--recipe", RECIPE, "--gpus", 2, "--rows", 100000], "use at most --rows "),
        ([*SEVEN, "--gpus", 4, "--gpu-memory", 8], "no number of GPUs up to 8 helps; use adapters"),
        (
            [*SEVEN, "--gpus", 1, "--gpu-memory", 6, "--model.lora_rank", 8, "--model.shard", "false"],
            "up to 8 helps; use a smaller --micro-batch-tokens",
        ),
        ([*SEVEN, "--gpus", 8, "--price", -1], "--price is -1"),
        ([*SEVEN, "--gpus", 8, "--link", 0], "link is 0"),
        ([*SEVEN, "--gpus", 8, "--per-node", 0], "GPUs per node is 0"),
        ([*SEVEN, "--gpus", 8, "--mean", -5], "mean -5"),
        ([*SEVEN, "--gpus", 8, "--lengths", "."], "holds no steps"),
        ([*SEVEN, "--gpus", 8, "--lengths", ".", "--mean", 5], "--mean and --lengths both"),
        ([*SEVEN, "--gpus", 8, "--rollout.bugdet", 5], "did you mean 'budget'"),
        ([*SEVEN, "--price", 3], "--price only has a meaning with --gpus"),
        ([*SEVEN, "--rollout.promts", 3], "did you mean 'prompts'"),
        (["--gpus", 8], "give either --model"),
    ],
)
def test_a_run_on_many_gpus_that_cannot_be_is_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused = run("plan", *arguments)
    assert refused.returncode == 1 and message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and refused.stderr.endswith(".\n")


def test_the_suggested_rows_fit():
    command = ["plan", "--recipe", RECIPE, "--gpus", 2, "--rows"]
    found = re.search(r"--rows (\d+)", run(*command, 100000).stderr)
    assert found is not None
    rows = int(found[1])
    assert run(*command, rows).returncode == 0 != run(*command, rows + 1).returncode


POOL = ["plan", "--recipe", RECIPE, "--gpus", 2, "--rollout.pool", "ray://head:6379", "--rollout.samplers", 6]


def test_the_numbers_of_a_pool_agree():
    found = json.loads(run(*POOL, "--price", 2, "--json").stdout)
    assert (found["gpus"], found["samplers"]) == (2, 6)
    assert found["gpu_hours"] == pytest.approx((2 + 6) * found["step"] * found["steps"] / 3600)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"]) and 0 < found["idle"] < 1
    assert 0 < found["bytes_per_sampler"] < found["bytes_per_gpu"] < found["memory"]
    slower = json.loads(run(*POOL, "--store", 0.5, "--message", 100, "--json").stdout)
    assert slower["publish"] == pytest.approx(2 * found["publish"]) and slower["exchange"] > found["exchange"]
    alone = json.loads(run("plan", "--recipe", RECIPE, "--rollout.pool", "ray", "--json").stdout)
    assert 0 < alone["bytes_per_sampler"] < alone["total_bytes"]


def test_the_table_of_a_pool():
    shown = run(*POOL, "--price", 2).stdout
    for label in ("a learner on 2 GPUs (gradients summed (DDP)) and 6 samplers with a GPU each", "scoring, on the"):
        assert label in shown
    for label in ("memory of a GPU of the learner", "memory of a sampler's GPU", "messages", "assumptions", "cost"):
        assert label in shown
    steps = int(re.search(r"(\d+) steps", shown)[1])
    both, learner, samplers = (int(found) for found in re.findall(r"(\d+) (?:GPU hours|and)", shown))
    assert abs(both - learner - samplers) <= 1 and samplers == pytest.approx(3 * learner, abs=2) and steps == 100
    ahead = run(*POOL, "--rollout.ahead", 2).stdout
    assert "rollout and scoring, until" in ahead and "at the same time" in ahead and "on the learner " not in ahead
    alone = run("plan", "--recipe", RECIPE, "--rollout.pool", "ray").stdout
    assert "each sampler of the pool: " in alone and "samplers of the pool on this GPU" in alone
    local = [option if option != "ray://head:6379" else "ray" for option in POOL]  # each has a GPU, says the mode
    assert run(*local, "--gpus", 1, "--price", 2).stdout == run(*POOL, "--gpus", 1, "--price", 2).stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*POOL, "--rollout.samplers", 0], "a plan cannot know; give --rollout.samplers"),
        ([*POOL, "--rollout.samplers", 1], "each of the learner's 2 processes needs one; use at least 2"),
        ([*POOL, "--message", 0], "message is 0"),
        (["plan", *SEVEN, "--gpus", 8, "--store", 3], "--store only has a meaning with a pool"),
        (["plan", *SEVEN, "--message", 3], "--message only has a meaning with --gpus"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments, message):
    refused = run(*arguments)
    assert refused.returncode == 1 and message in refused.stderr and len(refused.stderr.splitlines()) == 1
