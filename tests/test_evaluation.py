"""Evaluations: nothing is lost or repeated, numbers are those of their items, models are compared problem by problem."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse_rl import Engine, Sampling, SparseRLError, load_model, tasks
from sparse_rl.beacon import add_beacon
from sparse_rl.checkpoint import save_model
from sparse_rl.cli import app
from sparse_rl.evaluation import Cache, Exam, Results, ask, summarize
from sparse_rl.evaluation.ask import fingerprint
from sparse_rl.evaluation.cache import caches
from sparse_rl.evaluation.compare import ALL, agreement, cross, difference
from sparse_rl.evaluation.results import Item, shares
from sparse_rl.evaluation.run import Asked, Evaluated, choose_template, evaluate
from sparse_rl.records import entries, kv_tokens_saved
from sparse_rl.statistics import interval, mcnemar, paired

SMALL = ["--limit", 10, "--samples", 2, "--max-new-tokens", 40, "--rows", 4, "--seed", 3]
SPARSE = ["--compressor", "rkv", "--budget", 24, "--interval", 4]


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def asked_again(tmp_path, exams, rows=4, cache="rkv", **question):
    """What `ask` leaves in a folder, as items."""
    model, tokenizer = load_model("tiny-sums")
    results = Results(tmp_path, {"model": "tiny-sums", "benches": {e.name: e.settings() for e in exams}, **question})
    summaries = ask(Engine(model, cache, budget=24, interval=4, rows=rows), tokenizer, exams, 3, results)
    return results, summaries


def exam(name="sums", count=6, samples=2, new=40, **options) -> Exam:
    task = tasks.make(name, **options).held_out()
    return Exam(name, task, task.sample(0, count), samples, Sampling(new), options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def item(bench="sums", index=0, sample=0, right=True, answer="1", **more) -> Item:
    usual = {"prompt": "p", "text": "t", "finish": "stop", "prompt_tokens": 4, "tokens": 6, "loop": False}
    usual |= {"entries": 7.0, "peak_entries": 9.0, "last_entries": 9.0, "gold": "1", "verdict": "right" if right else "wrong"}
    return Item(bench=bench, index=index, sample=sample, answer=answer, reward=float(right), **(usual | more))


# ------------------------------------------------------------------------------------------------------------ what is written


def test_items_say_what_the_engine_did(tmp_path):
    e = exam()
    results, (summary,) = asked_again(tmp_path, [e])
    model, tokenizer = load_model("tiny-sums")
    engine = Engine(model, "rkv", budget=24, interval=4, rows=4)
    trajectories = engine.generate([tokenizer.encode(p.text) for p in e.prompts], 2, Sampling(40), 3)
    texts = [tokenizer.decode(t.response_tokens, skip_special_tokens=True) for t in trajectories]
    grades = e.task.grade([e.prompts[t.prompt_index] for t in trajectories], texts)
    written = lines(tmp_path / "items.jsonl")
    assert len(written) == 12 == len(trajectories) and not (tmp_path / "completions.jsonl").exists()
    for line, t, text, grade in zip(written, trajectories, texts, grades, strict=True):
        assert (line["index"], line["sample"], line["text"], line["finish"]) == (t.prompt_index, t.sample_index, text, t.finish_reason)
        assert line["prompt"] == e.prompts[t.prompt_index].text and line["gold"] == e.prompts[t.prompt_index].answer
        assert (line["verdict"], line["reward"]) == (grade.verdict, grade.reward)
        assert line["answer"] == e.task.extracted(text)
        assert (line["entries"], line["peak_entries"]) == (entries(t).mean().item(), entries(t).max().item())
        assert (line["tokens"], line["prompt_tokens"]) == (len(t.response_tokens), t.num_prompt_tokens)
    assert summary.tokens_saved == pytest.approx(kv_tokens_saved(trajectories), abs=1e-12)
    assert summary.accuracy == sum(g.reward >= 1 for g in grades) / 12
    bytes_per_entry = engine.cache.shape.kv_bytes_per_token
    assert summary.kv_bytes == pytest.approx(bytes_per_entry * sum(entries(t).mean().item() for t in trajectories) / 12)
    assert summary.peak_kv_bytes == bytes_per_entry * max(entries(t).max().item() for t in trajectories) <= bytes_per_entry * 28
    (call,) = results.calls()
    assert call["tokens"] == sum(len(t.response_tokens) for t in trajectories) and call["cache_bytes"] == engine.cache.nbytes


@pytest.mark.parametrize("cache", ["rkv", "dense", "snapkv"])
def test_the_same_seed_gives_the_same_completions_whatever_the_batch(tmp_path, cache):
    """Rows, the company of other benchmarks, and how often the evaluation was stopped."""
    sums, few = exam(), exam("countdown", 4, 3)
    alone, _ = asked_again(tmp_path / "alone", [sums], rows=1, cache=cache)
    for rows, exams in ((3, [sums]), (16, [few, sums]), (5, [sums, few])):
        other, _ = asked_again(tmp_path / f"{rows}", exams, rows, cache)
        assert {key: i.text for key, i in other.items.items() if key[0] == "sums"} == {key: i.text for key, i in alone.items.items()}


def test_more_may_be_asked_for_later(tmp_path):
    asked_again(tmp_path, [exam(count=3, samples=1)])
    before = lines(tmp_path / "items.jsonl")
    asked_again(tmp_path, [exam(count=5, samples=2), exam("countdown", 2, 1)])
    after = lines(tmp_path / "items.jsonl")
    assert all(line in after for line in before) and len(after) == 12
    asked_again(tmp_path / "whole", [exam(count=5, samples=2), exam("countdown", 2, 1)])
    assert after == lines(tmp_path / "whole" / "items.jsonl")
    assert sum(c["tokens"] for c in lines(tmp_path / "calls.jsonl")) == sum(line["tokens"] for line in after)  # none sampled twice
    again, (few,) = asked_again(tmp_path, [exam(count=2, samples=1)])  # and less: nothing is sampled, nothing forgotten
    assert (few.problems, few.samples) == (2, 1) and lines(tmp_path / "items.jsonl") == after and len(again.calls()) == 2


# ------------------------------------------------------------------------------------------------------------ stopped, killed


def test_an_interrupt_keeps_what_was_finished(tmp_path, monkeypatch):
    add = Results.add

    def stop_after_five(self, completion):
        add(self, completion)
        if len(self.ungraded) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", stop_after_five)
        with pytest.raises(KeyboardInterrupt):
            asked_again(tmp_path / "a", [exam()])
    kept = lines(tmp_path / "a" / "completions.jsonl")
    assert len(kept) == 5 and not (tmp_path / "a" / "items.jsonl").exists()
    asked_again(tmp_path / "a", [exam()])
    asked_again(tmp_path / "b", [exam()])
    assert (tmp_path / "a" / "items.jsonl").read_bytes() == (tmp_path / "b" / "items.jsonl").read_bytes()
    calls = lines(tmp_path / "a" / "calls.jsonl")
    assert len(calls) == 2 and calls[0]["tokens"] == sum(c["tokens"] for c in kept)
    assert sum(c["tokens"] for c in calls) == sum(i["tokens"] for i in lines(tmp_path / "a" / "items.jsonl"))


def test_a_kill_while_grading_grades_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Results, "grade", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            asked_again(tmp_path / "a", [exam()])
    assert len(lines(tmp_path / "a" / "completions.jsonl")) == 12
    asked_again(tmp_path / "a", [exam()])
    asked_again(tmp_path / "b", [exam()])
    assert (tmp_path / "a" / "items.jsonl").read_bytes() == (tmp_path / "b" / "items.jsonl").read_bytes()
    assert len(lines(tmp_path / "a" / "calls.jsonl")) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_command_goes_on(tmp_path, number):
    words = ["tiny-sums", "--bench", "sums", "--limit", 64, "--samples", 2, "--max-new-tokens", 48, "--rows", 2, *SPARSE]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", "from sparse_rl.cli import main; main()", "eval", *map(str, words), "--out", str(killed)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    path = killed / "completions.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 6):
        time.sleep(0.005)
    process.send_signal(number)
    _, said = process.communicate()
    if number == signal.SIGTERM:
        assert process.returncode == 130 and "the same command goes on" in said
    kept = path.read_bytes()
    assert 6 <= kept.count(b"\n") < 128  # it was killed in the middle
    assert run(*words, "--out", killed).exit_code == 0 == run(*words, "--out", whole).exit_code
    assert (killed / "items.jsonl").read_bytes() == (whole / "items.jsonl").read_bytes()
    other = next(name for name in folders if "other" in name).split("/")[0]
    items = {name: lines(tmp_path / "x" / name / "dense" / "items.jsonl") for name in ("tiny-sums", other)}
    means = [sum(i["reward"] >= 1 for i in found if i["bench"] == "sums") / 20 for found in items.values()]
    assert worse["better"]["mean"] == pytest.approx(means[1] - means[0])
    for name in folders:
        assert len(lines(tmp_path / "x" / name / "calls.jsonl")) == 1  # the second command sampled nothing


def test_eval_of_a_folder_with_a_beacon(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    save_model(tmp_path / "student", add_beacon(model, (4, 2)), tokenizer)
    options = [tmp_path / "student", "--bench", "sums", "--limit", 6, "--max-new-tokens", 40, "--compressor", "beacon", "--json"]
    equal, early = (
        json.loads(run(*options, "--chunk", 4, *more, "--out", tmp_path / str(len(more))).stdout) for more in ([], ["--threshold", 0.1])
    )
    assert equal["rule"] == "prompt + a beacon per 4 tokens + a chunk" and early["rule"] == "prompt + a beacon per 2 to 4 tokens + a chunk"
    assert equal["benches"][0]["tokens_saved"] > 0.2
    with pytest.raises(SparseRLError, match="a beacon after 16 tokens was asked for, but this student was trained with one after 4 or 2"):
        raise run(*options, "--out", tmp_path / "x").exception


def test_a_reward_that_fails_is_told(tmp_path):
    """Tasks that are graded in processes of their own, which are gone afterwards."""
    (tmp_path / "mine.py").write_text("def prompt(i): return f'{i}+1=', i + 1\ndef reward(answer, text): return 1 // (answer % 2)\n")
    done = run("tiny-sums", "--bench", tmp_path / "mine.py", "--limit", 8, "--max-new-tokens", 4, "--json", "--out", tmp_path / "x")
    (found,) = json.loads(done.stdout)["benches"]
    assert found["accuracy"] == 0.5 and found["errors"] == 4 and "grading failed in" in done.stderr and "ZeroDivisionError" in done.stderr


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
            "beacon has no parameter 'sinks'; did you mean 'chunk'? Known: chunk",
        ),
        (["--compressor", "rkv", "--compressor.snks", 8], "rkv has no parameter 'snks'; did you mean 'sinks'"),
        (
            ["--rollout.budget", 3],
            "eval has no --rollout.budget (options of benchmarks and compressors: --sums.KEY VALUE,",
        ),
        (["--budgt", 3], "did you mean 'budget'"),
        (["--sums.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["--task.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["--task.count"], "--task.count has no value"),
        (["tiny"], "2 models are named; give one, or several with --compare."),
        (["--limit", 0], "limit is 0; it must be a whole number of at least 1."),
        (["--samples", 0], "samples is 0"),
        (["--max-new-tokens", 0], "max_new_tokens"),
        (["--compare", "--budgets", "12,x"], "--budgets is '12,x'; give whole numbers of at least 1, with commas, such as 128,256."),
        (["--compare", "--compressors", "rkv"], "has no dense cache to compare with"),
        (["--compare", "--compressors", ","], "--compressors is ','; name at least one."),
        (["--compare", "--compressors", "dense,rkw"], "there is no compressor 'rkw'; did you mean 'rkv'"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", "sums", *arguments)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
    assert not list(tmp_path.rglob("items.jsonl"))


@pytest.mark.parametrize("bench, message", [("sums,sums", "each once"), (",", "name one or more"), ("smus", "did you mean 'sums'")])
def test_mistakes_in_benchmarks_get_a_sentence(tmp_path, monkeypatch, bench, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", bench)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
