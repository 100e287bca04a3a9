"""How many entries a row held, and what `sparse-rl eval` says of a model."""

import copy
import json

import pytest
import torch
from conftest import prompts_of, tiny
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparse_rl import Engine, Sampling, SparseRLError, Trace, Trajectory, load_model, tasks
from sparse_rl.beacon import add_beacon
from sparse_rl.checkpoint import save_model
from sparse_rl.cli import app
from sparse_rl.compressors import make
from sparse_rl.evaluate import accuracy, evaluate
from sparse_rl.records import kv_tokens_saved, mean_entries
from sparse_rl.statistics import wilson


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


# ------------------------------------------------------------------------------------------------------------ entries


def counted(t: Trajectory) -> float:
    """Query by query, token by token, as the trace's definition says."""
    gone, seen = t.trace.evicted_at.tolist(), []
    for q in range(t.num_prompt_tokens, len(t.tokens) - 1):
        seen += [sum(k <= q < head[k] for k in range(len(head))) for layer in gone for head in layer]
    return sum(seen) / len(seen) if seen else t.num_prompt_tokens


COMPRESSORS = ["dense", "rkv", "prompt-only", "beacon:2", "beacon:5", "beacon:64"]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_mean_entries_are_those_of_a_count_by_hand(name):
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine = Engine(model, make(name), budget=12, interval=4, rows=4)
    trajectories = engine.generate(prompts_of(5, 19, 3), 2, Sampling(max_new_tokens=33, stop_ids=(3, 7, 11)), seed=3)
    assert len({len(t.tokens) for t in trajectories}) > 1
    for t in trajectories:
        assert mean_entries(t) == pytest.approx(counted(t), abs=1e-12)
    (t,) = engine.generate(prompts_of(19), 1, Sampling(max_new_tokens=1))
    assert mean_entries(t) == counted(t) == 19


@given(st.integers(1, 5), st.integers(0, 12), st.randoms(use_true_random=False))
def test_mean_entries_of_any_trace(prompt, new, draw):
    tokens = prompt + new
    gone = torch.tensor([[[draw.randint(k + 1, tokens + 2) for k in range(tokens)] for _ in range(2)] for _ in range(2)])
    t = Trajectory(torch.zeros(tokens, dtype=torch.int64), prompt, torch.zeros(tokens), Trace(gone.to(torch.uint16)), "length", 0, 0)
    assert mean_entries(t) == pytest.approx(counted(t), abs=1e-12)


def test_mean_entries_where_they_are_known():
    model = add_beacon(copy.deepcopy(tiny("llama")))
    sampling = Sampling(max_new_tokens=10, stop_ids=())
    (dense,) = Engine(model, "dense").generate(prompts_of(7), 1, sampling)
    assert mean_entries(dense) == sum(range(8, 17)) / 9  # 9 of the 10 are fed
    (folded,) = Engine(model, "beacon:4").generate(prompts_of(7), 1, sampling)
    assert mean_entries(folded) == (8 + 9 + 10 + 11 + 12 + 9 + 10 + 11 + 12 + 13 + 10) / 11  # two beacons are


# ------------------------------------------------------------------------------------------------------------ accuracy


def test_accuracy_counts_entries():
    model, tokenizer = load_model("tiny-sums")
    task = tasks.make("sums").held_out()
    prompts, sampling = task.sample(0, 12), Sampling(max_new_tokens=64)
    engine = Engine(model, "rkv", budget=38, interval=4, rows=12)
    found = accuracy(engine, tokenizer, task, prompts, 2, sampling, 5)
    assert set(found) == {"accuracy", "reward", "length", "truncated", "loops", "ungraded", "entries"}
    trajectories = engine.generate([tokenizer.encode(p.text) for p in prompts], 2, sampling, 5)
    assert found["entries"] == pytest.approx(sum(map(counted, trajectories)) / 24)
    assert found["entries"] < 42  # what a row has room for
    whole = evaluate(engine, tokenizer, task, 12, 2, sampling, 5)
    assert {name: getattr(whole, name) for name in found} == found
    assert whole.tokens_saved == kv_tokens_saved(trajectories)
    assert 0 <= whole.low <= whole.accuracy <= whole.high <= 1
    assert wilson(whole.accuracy, 24)[0] >= whole.low >= wilson(whole.accuracy, 12)[0] - 1e-12  # two completions of twelve prompts


def test_a_task_with_fewer_prompts_gives_all_it_has():
    model, tokenizer = load_model("tiny-sums")

    class Few(tasks.Task):
        name = "few"

        def __len__(self):
            return 30

        def __getitem__(self, i):
            return tasks.Prompt(f"{i}+1=", i + 1, i)

        def reward(self, prompt, text):
            return 0.0

    found = evaluate(Engine(model, "dense", rows=4), tokenizer, Few().held_out(), 256, 1, Sampling(max_new_tokens=4), 0)
    assert found.prompts == 3 and found.accuracy == 0.0 == found.low


# ------------------------------------------------------------------------------------------------------------ the command


def test_eval_says_what_evaluate_found():
    options = ["tiny-sums", "--task", "sums", "--task.count", 3, "--prompts", 20, "--max-new-tokens", 48, "--rows", 8, "--seed", 4]
    small = [*options, "--compressor", "rkv", "--budget", 20, "--interval", 4, "--compressor.protect_prompt", "true", "--samples", 2]
    done = run(*small, "--json")
    assert done.exit_code == 0, done.exception
    numbers = json.loads(done.stdout)
    model, tokenizer = load_model("tiny-sums")
    engine = Engine(model, make("rkv", protect_prompt=True), budget=20, interval=4, rows=8)
    task = tasks.make("sums", count=3).held_out()
    found = evaluate(engine, tokenizer, task, 20, 2, Sampling(max_new_tokens=48), 4)
    assert {name: numbers[name] for name in vars(found)} == vars(found)
    assert (numbers["model"], numbers["task"], numbers["compressor"]) == ("tiny-sums", "sums", "rkv")
    shown = run(*options)
    assert shown.exit_code == 0 and shown.stdout.startswith("tiny-sums on sums, dense (nothing evicted)\n  accuracy ")
    labels = ("reward", "mean length", "truncated", "ends in a loop", "ungraded", "mean cache entries", "KV tokens saved     0.0%", "95 %:")
    assert all(label in shown.stdout for label in labels)


def test_eval_of_a_folder_with_a_beacon(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    save_model(tmp_path / "student", add_beacon(model, (4, 2)), tokenizer)
    options = [tmp_path / "student", "--task", "sums", "--prompts", 6, "--max-new-tokens", 40, "--compressor", "beacon", "--json"]
    equal, early = (json.loads(run(*options, "--chunk", 4, *more).stdout) for more in ([], ["--threshold", 0.1]))
    assert equal["rule"] == "prompt + a beacon per 4 tokens + a chunk" and early["rule"] == "prompt + a beacon per 2 to 4 tokens + a chunk"
    assert equal["tokens_saved"] > 0.2
    with pytest.raises(SparseRLError, match="a beacon after 16 tokens was asked for, but this student was trained with one after 4 or 2"):
        raise run(*options).exception


def test_a_reward_that_fails_is_told(tmp_path):
    """Tasks that are graded in processes of their own, which are gone afterwards."""
    (tmp_path / "mine.py").write_text("def prompt(i): return f'{i}+1=', i + 1\ndef reward(answer, text): return 1 // (answer % 2)\n")
    done = run("tiny-sums", "--task", tmp_path / "mine.py", "--prompts", 8, "--max-new-tokens", 4, "--json")
    found = json.loads(done.stdout)
    assert found["accuracy"] == found["ungraded"] == 0.5 and "grading failed (ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--chunk", 8], "--chunk 8 is for beacons, but the compressor is dense; leave it away, or use --compressor beacon."),
        (["--compressor", "rkv", "--threshold", 0.5], "--threshold 0.5 is for beacons, but the compressor is rkv"),
        (["--compressor", "beacon", "--chunk", 8], "this model has no beacon"),
        (["--compressor", "beacon", "--chunk", 1], "must be a whole number from 2 on"),
        (["--compressor", "beacon:16", "--chunk", 8], "beacon:16 has its chunk in its name, but chunk=8 was given too; give it once."),
        (
            ["--compressor", "beacon", "--compressor.sinks", 8],
            "beacon has no parameter 'sinks'; did you mean 'chunk'? Known: chunk, threshold.",
        ),
        (["--compressor", "rkv", "--compressor.snks", 8], "rkv has no parameter 'snks'; did you mean 'sinks'"),
        (["--rollout.budget", 3], "eval has no --rollout.budget (options of the task are --task.KEY VALUE, of the compressor"),
        (["--budgt", 3], "did you mean 'budget'"),
        (["--task.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["--task.count"], "--task.count has no value"),
        (["sums"], "'sums' is no key; keys are written --section.key value, such as --task.seed 1."),
        (["--prompts", 0], "prompts is 0; it must be a whole number of at least 1."),
        (["--max-new-tokens", 0], "max_new_tokens"),
    ],
)
def test_mistakes_get_a_sentence(arguments, message):
    done = run("tiny-sums", "--task", "sums", *arguments)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
