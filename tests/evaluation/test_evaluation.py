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
from sparse_rl.cli.main import app
from sparse_rl.config import make_recipe
from sparse_rl.evaluation import Cache, Exam, Results, ask, summarize
from sparse_rl.evaluation.ask import fingerprint
from sparse_rl.evaluation.cache import caches
from sparse_rl.evaluation.compare import ALL, agreement, cross, difference
from sparse_rl.evaluation.results import Item, shares
from sparse_rl.evaluation.run import Asked, Evaluated, evaluate
from sparse_rl.evaluation.statistics import interval, mcnemar, paired
from sparse_rl.records import entries, kv_tokens_saved
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.run import train

SMALL = ["--limit", 10, "--samples", 2, "--max-new-tokens", 40, "--rows", 4, "--seed", 3]
SPARSE = ["--compressor", "rkv", "--budget", 24, "--interval", 4]


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def asked_again(tmp_path, exams, rows=4, cache="rkv", **question):
    """What `ask` leaves in a folder, as items."""
    model, tokenizer = load_model("tiny-sums")
    with Results(
        tmp_path, {"model": "tiny-sums", "benches": {e.name: e.settings() for e in exams}, **question}
    ) as results:
        summaries = ask(Engine(model, cache, budget=24, interval=4, rows=rows), tokenizer, exams, 3, results)
    return results, summaries


def exam(name="sums", count=6, samples=2, new=40, **options) -> Exam:
    task = tasks.make(name, **options).held_out()
    return Exam(name, task, task.sample(0, count), samples, Sampling(new), options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def item(bench="sums", index=0, sample=0, right=True, answer="1", **more) -> Item:
    usual = {"prompt": "p", "text": "t", "finish": "stop", "prompt_tokens": 4, "tokens": 6, "loop": False}
    usual |= {
        "entries": 7.0,
        "peak_entries": 9.0,
        "last_entries": 9.0,
        "gold": "1",
        "verdict": "right" if right else "wrong",
    }
    return Item(bench=bench, index=index, sample=sample, answer=answer, reward=float(right), **(usual | more))


# ---------- what is written


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
        assert (line["index"], line["sample"], line["text"], line["finish"]) == (
            t.prompt_index,
            t.sample_index,
            text,
            t.finish_reason,
        )
        assert line["prompt"] == e.prompts[t.prompt_index].text and line["gold"] == e.prompts[t.prompt_index].answer
        assert (line["verdict"], line["reward"]) == (grade.verdict, grade.reward)
        assert line["answer"] == e.task.extracted(text)
        assert (line["entries"], line["peak_entries"]) == (entries(t).mean().item(), entries(t).max().item())
        assert (line["tokens"], line["prompt_tokens"]) == (len(t.response_tokens), t.num_prompt_tokens)
    assert summary.tokens_saved == pytest.approx(kv_tokens_saved(trajectories), abs=1e-12)
    assert summary.accuracy == sum(g.reward >= 1 for g in grades) / 12
    bytes_per_entry = engine.cache.shape.kv_bytes_per_token
    assert summary.kv_bytes == pytest.approx(bytes_per_entry * sum(entries(t).mean().item() for t in trajectories) / 12)
    assert (
        summary.peak_kv_bytes
        == bytes_per_entry * max(entries(t).max().item() for t in trajectories)
        <= bytes_per_entry * 28
    )
    (call,) = results.calls()
    assert (
        call["tokens"] == sum(len(t.response_tokens) for t in trajectories)
        and call["cache_bytes"] == engine.cache.nbytes
    )


@pytest.mark.parametrize("cache", ["rkv", "dense", "snapkv"])
def test_the_same_seed_gives_the_same_completions_whatever_the_batch(tmp_path, cache):
    """Rows, the company of other benchmarks, and how often the evaluation was stopped."""
    sums, few = exam(), exam("countdown", 4, 3)
    alone, _ = asked_again(tmp_path / "alone", [sums], rows=1, cache=cache)
    for rows, exams in ((3, [sums]), (16, [few, sums]), (5, [sums, few])):
        other, _ = asked_again(tmp_path / f"{rows}", exams, rows, cache)
        assert {key: i.text for key, i in other.items.items() if key[0] == "sums"} == {
            key: i.text for key, i in alone.items.items()
        }


def test_more_may_be_asked_for_later(tmp_path):
    asked_again(tmp_path, [exam(count=3, samples=1)])
    before = lines(tmp_path / "items.jsonl")
    asked_again(tmp_path, [exam(count=5, samples=2), exam("countdown", 2, 1)])
    after = lines(tmp_path / "items.jsonl")
    assert all(line in after for line in before) and len(after) == 12
    asked_again(tmp_path / "whole", [exam(count=5, samples=2), exam("countdown", 2, 1)])
    assert after == lines(tmp_path / "whole" / "items.jsonl")
    assert sum(c["tokens"] for c in lines(tmp_path / "calls.jsonl")) == sum(
        line["tokens"] for line in after
    )  # none sampled twice
    again, (few,) = asked_again(tmp_path, [exam(count=2, samples=1)])  # and less: nothing is sampled, nothing forgotten
    assert (
        (few.problems, few.samples) == (2, 1) and lines(tmp_path / "items.jsonl") == after and len(again.calls()) == 2
    )


# ---------- stopped, killed


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
    words = [
        "tiny-sums",
        "--bench",
        "sums",
        "--limit",
        24,
        "--samples",
        2,
        "--max-new-tokens",
        48,
        "--rows",
        2,
        *SPARSE,
    ]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [
        sys.executable,
        "-c",
        "from sparse_rl.cli import main; main()",
        "eval",
        *map(str, words),
        "--out",
        str(killed),
    ]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    path = killed / "completions.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 6):
        time.sleep(0.005)
    process.send_signal(number)
    _, said = process.communicate()
    if number == signal.SIGTERM:
        assert process.returncode == 130 and "the same command goes on" in said
    kept = path.read_bytes()
    assert 6 <= kept.count(b"\n") < 48  # it was killed in the middle
    assert run(*words, "--out", killed).exit_code == 0 == run(*words, "--out", whole).exit_code
    assert (killed / "items.jsonl").read_bytes() == (whole / "items.jsonl").read_bytes()
    items = {(i["index"], i["sample"]): i["text"] for i in lines(killed / "items.jsonl")}
    early = [json.loads(line) for line in kept.split(b"\n")[:-1]]
    assert all(items[c["index"], c["sample"]] == c["text"] for c in early)
    calls = lines(killed / "calls.jsonl")
    assert len(calls) == (1 if number == signal.SIGKILL else 2)  # a killed call cannot say what it took
    sampled_later = sum(i["tokens"] for i in lines(killed / "items.jsonl")) - sum(c["tokens"] for c in early)
    assert calls[-1]["tokens"] == sampled_later


def test_a_torn_line_is_forgotten(tmp_path):
    asked_again(tmp_path, [exam()])
    whole = (tmp_path / "items.jsonl").read_bytes()
    written = [
        {k: v for k, v in i.items() if k not in ("gold", "answer", "verdict", "reward")}
        for i in lines(tmp_path / "items.jsonl")
    ]
    (tmp_path / "items.jsonl").unlink()
    text = "".join(json.dumps(w) + "\n" for w in written[:7])
    (tmp_path / "completions.jsonl").write_text(text[:-20])
    with (tmp_path / "calls.jsonl").open("a") as calls:
        calls.write('{"tokens": 3, "sec')
    asked_again(tmp_path, [exam()])
    assert (tmp_path / "items.jsonl").read_bytes() == whole
    assert len(lines(tmp_path / "calls.jsonl")) == 2  # and the next line begins where it began


def test_another_question_needs_another_folder(tmp_path):
    asked_again(tmp_path, [exam()], seed=1)
    with pytest.raises(
        SparseRLError, match=r"holds an evaluation with seed = 1, not 2; choose another folder with --out\."
    ):
        asked_again(tmp_path, [exam()], seed=2)
    with pytest.raises(SparseRLError, match=r"sums.max_new_tokens = 40, not 41"):
        asked_again(tmp_path, [exam(new=41)], seed=1)
    with pytest.raises(SparseRLError, match=r"sums.options.count = None, not 3"):
        asked_again(tmp_path, [Exam("sums", tasks.make("sums"), [], 1, Sampling(40), {"count": 3})], seed=1)
    other = exam()
    changed = Exam("sums", other.task, [tasks.Prompt("1+1=", 2, 0), *other.prompts[1:]], 2, other.sampling)
    with pytest.raises(SparseRLError, match=r"completions of another problem 0 of sums \('.*', not '1\+1='\)"):
        asked_again(tmp_path, [changed], seed=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(SparseRLError, match="is a file; results need a folder"):
        asked_again(tmp_path / "file", [exam()])


def test_a_question_that_was_never_answered_claims_no_folder(tmp_path):
    Results(tmp_path, {"seed": 1, "benches": {}}).close()
    Results(tmp_path, {"seed": 2, "benches": {}}).close()


def test_one_evaluation_at_a_time_has_a_folder(tmp_path):
    with Results(tmp_path, {"benches": {}}), pytest.raises(SparseRLError, match="another evaluation is writing to"):
        Results(tmp_path, {"benches": {}})
    Results(tmp_path, {"benches": {}}).close()


@pytest.mark.parametrize("name", ["items.jsonl", "completions.jsonl", "calls.jsonl", "evaluation.json"])
@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe\n", b"nonsense\n", b"[1]\n"])
def test_damaged_folders_get_a_sentence(tmp_path, name, content):
    asked_again(tmp_path, [exam(count=2)])
    (tmp_path / name).write_bytes(content)
    try:
        asked_again(tmp_path, [exam(count=2)])
    except SparseRLError as error:
        assert name in str(error) and (content or name == "evaluation.json")
    else:
        assert len(lines(tmp_path / "items.jsonl")) == 4  # what could be read was gone on with
    with pytest.raises(SparseRLError, match=r"/proc/no/such"):
        Results(Path("/proc/no/such"), {"benches": {}})


def test_other_weights_are_another_model():
    model, _ = load_model("tiny-sums")
    before = fingerprint(model)
    assert before == fingerprint(load_model("tiny-sums")[0])
    model.lm_head.weight.data[-1, -1] += 1e-3
    assert fingerprint(model) != before != fingerprint(load_model("tiny-sums", "bfloat16")[0])


# ---------- numbers


def test_a_summary_is_what_its_items_say():
    right = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
    verdicts = iter(["timeout", "error", "bad gold", "no answer", "no answer"])
    items = [
        item(
            index=i,
            sample=s,
            right=bool(r),
            tokens=10 * i + s,
            entries=float(i),
            peak_entries=float(i + s),
            loop=i == 1,
        )
        for i, row in enumerate(right)
        for s, r in enumerate(row)
    ]
    wrong = [k for k, i in enumerate(items) if not i.right][:5]
    for k in wrong:
        items[k] = Item(**{**vars(items[k]), "verdict": next(verdicts), "finish": "length"})
    found = summarize(items, 4, 100)
    assert found.accuracy == 10 / 20 and (found.low, found.high) == interval([sum(r) / 4 for r in right], 4)
    for k in (1, 2, 4):  # of all ways to choose k of a problem's completions
        chances = [[any(chosen) for chosen in itertools.combinations(row, k)] for row in right]
        assert found.pass_at[k] == pytest.approx(sum(sum(c) / len(c) for c in chances) / 5)
    assert list(found.pass_at) == [1, 2, 4]
    assert (found.timeouts, found.errors, found.bad_golds, found.ungraded, found.no_answer) == (1, 1, 1, 3, 0.1)
    assert (found.truncated, found.loops, found.entries, found.peak_entries) == (0.25, 0.2, 2.0, 7.0)
    assert (found.kv_bytes, found.peak_kv_bytes) == (200.0, 700.0)
    assert found.length == sum(10 * i + s for i in range(5) for s in range(4)) / 20
    with pytest.raises(ValueError, match="19 items of 5 problems are not 4 for each"):
        summarize(items[1:], 4, 100)


def evaluated(model: str, cache: Cache, items: list[Item]) -> Evaluated:
    benches = list(dict.fromkeys(i.bench for i in items))
    summaries = [
        summarize([i for i in items if i.bench == b], Counter((i.bench, i.index) for i in items)[b, 0], 1)
        for b in benches
    ]
    return Evaluated(model, cache, "", Path(), summaries, items, 10.0, 0)


def test_models_and_caches_are_compared_on_the_same_problems():
    outcomes = {  # of eight problems
        ("a", "dense"): "11110000",
        ("a", "rkv"): "10100100",
        ("b", "dense"): "11111000",
        ("b", "rkv"): "11111100",
    }
    found = [
        evaluated(
            model,
            Cache(name, 8 if name == "rkv" else None),
            [item(index=i, right=r == "1", answer=r) for i, r in enumerate(row)],
        )
        for (model, name), row in outcomes.items()
    ]
    cells = {(c.model, c.cache): c for c in cross(found)}
    assert list(cells) == [("a", "dense"), ("b", "dense"), ("a", "rkv 8"), ("b", "rkv 8")]
    assert cells["a", "dense"].cost is None is cells["a", "dense"].better is cells["a", "rkv 8"].better
    cost = cells["a", "rkv 8"].cost
    assert cost.mean == -1 / 8 and cost.p == mcnemar(1, 2)
    assert cells["b", "rkv 8"].cost.mean == 1 / 8
    assert cells["b", "dense"].better.mean == 1 / 8 and cells["b", "dense"].better.p == mcnemar(1, 0) == 1.0
    better = cells["b", "rkv 8"].better
    assert better.mean == 3 / 8 and better.p == mcnemar(3, 0) == 0.25
    assert cells["a", "rkv 8"].same_verdict == 5 / 8 == cells["a", "rkv 8"].same_answer
    here, there = item(index=0, answer="", verdict="no answer"), item(index=0, answer="", verdict="no answer")
    assert agreement([here], [there])[1] is None  # an empty box is no answer
    assert cells["a", "rkv 8"].tokens_saved == pytest.approx(0.1) and cells["a", "rkv 8"].accuracy == 3 / 8


def test_several_benchmarks_are_also_pooled():
    def both(first: str, second: str) -> list[Item]:
        return [
            item(bench, i, right=r == "1")
            for bench, row in (("sums", first), ("more", second))
            for i, r in enumerate(row)
        ]

    found = [evaluated("a", Cache("dense"), both("110", "1")), evaluated("a", Cache("rkv", 8), both("100", "0"))]
    cells = {(c.bench, c.cache): c for c in cross(found)}
    assert cells[ALL, "dense"].accuracy == 3 / 4 and cells[ALL, "rkv 8"].accuracy == 1 / 4
    assert cells[ALL, "rkv 8"].cost.mean == -1 / 2 and cells["sums", "rkv 8"].cost.mean == pytest.approx(-1 / 3)


def test_pairs_are_problems_with_all_their_completions():
    first = [item(index=i, sample=s, right=(i + s) % 3 == 0) for i in range(9) for s in range(2)]
    second = [item(index=i, sample=s, right=i % 2 == 0) for i in range(9) for s in range(2)]
    a, b = shares(first), shares(second)
    assert difference(first, second) == paired(list(a.values()), list(b.values()))
    assert difference(first, second[4:]) == paired(list(a.values())[2:], list(b.values())[2:])
    assert (
        agreement(second, first)[0] == sum(((i + s) % 3 == 0) == (i % 2 == 0) for i in range(9) for s in range(2)) / 18
    )
    assert agreement([item(answer=None)], [item(answer=None)]) == (1.0, None, 1.0)
    assert (
        agreement([item(text="abxd"), item(sample=1, text="")], [item(text="abcde"), item(sample=1, text="a")])[2]
        == 0.2
    )


def test_caches_of_a_comparison():
    found = caches(["rkv", "dense", "beacon:8", "snapkv"], [16, 32], 4, {"protect_prompt": True})
    assert [c.label for c in found] == [
        "dense",
        "rkv 16 protect_prompt=True",
        "rkv 32 protect_prompt=True",
        "beacon:8",
        "snapkv 16 protect_prompt=True",
        "snapkv 32 protect_prompt=True",
    ]
    assert found[0].make().name == "dense" and found[1].make().protect_prompt and found[1].interval == 4
    with pytest.raises(SparseRLError, match="has no dense cache to compare with; add dense"):
        caches(["rkv"], [16], 4, {})
    with pytest.raises(SparseRLError, match="none of dense, rkv has a parameter 'snks'"):
        caches(["dense", "rkv"], [16], 4, {"snks": 3})


# ---------- how it is asked


QUESTIONS = [("What is 1 + 1?", "1 and 1\n#### 2"), ("What is 2 + 3?", "#### 5"), ("What is 10 - 3?", "#### 7")]


@pytest.fixture
def gsm8k(tmp_path) -> Path:
    """Three rows in the form of the published file."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"question": question, "answer": answer, "idx": i} for i, (question, answer) in enumerate(QUESTIONS)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def short(tmp_path) -> str:
    """The built-in model with positions for 200 tokens, so that a response of all it has room for is soon over."""
    model, tokenizer = load_model("tiny-sums")
    model.config.max_position_embeddings = 200
    model.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    return str(tmp_path / "short")


def test_a_benchmark_is_asked_as_published_where_nothing_is_said(tmp_path, gsm8k, short):
    said = []
    asked = Asked(["gsm8k"], {"gsm8k": {"subset": True}}, data=str(gsm8k), rows=2)
    (done,) = evaluate(short, [Cache("dense")], asked, lambda cache: tmp_path / cache.folder, said.append)
    settings = json.loads((tmp_path / "dense" / "evaluation.json").read_text())["benches"]["gsm8k"]
    model, _ = load_model(short)
    room = model.config.max_position_embeddings - max(i.prompt_tokens for i in done.items)
    assert settings["temperature"] == 0.8 and settings["top_p"] == 0.95 and settings["max_new_tokens"] == room < 8192
    assert any(f"{room:,} new tokens instead of 8,192" in line for line in said)
    assert settings["options"] == {"template": "plain", "subset": True}  # the folder may move
    assert [i.prompt for i in done.items] == [question for question, _ in QUESTIONS]
    assert [i.gold for i in done.items] == ["2", "5", "7"]


def test_the_length_does_not_depend_on_how_much_is_asked(tmp_path, gsm8k, short):
    """So that more can be asked for later."""
    words = [short, "--bench", "gsm8k", "--gsm8k.subset", "true", "--data", gsm8k, "--rows", 2, "--out", tmp_path / "x"]
    for limit in (1, 3):
        done = run(*words, "--limit", limit)
        assert done.exit_code == 0, done.exception
    assert len(lines(tmp_path / "x" / "items.jsonl")) == 3 and f"{limit} of its 1,319 problems are asked" in done.stderr


def test_a_changed_reference_is_graded_again(tmp_path, gsm8k):
    words = [
        "tiny-sums",
        "--bench",
        "gsm8k",
        "--gsm8k.subset",
        "true",
        "--data",
        gsm8k,
        "--max-new-tokens",
        4,
        "--rows",
        2,
    ]
    assert run(*words, "--out", tmp_path / "x").exit_code == 0
    path = gsm8k / "gsm8k.jsonl"
    path.write_text(path.read_text().replace("#### 5", "#### 6"))
    assert run(*words, "--out", tmp_path / "x").exit_code == 0
    assert [i["gold"] for i in lines(tmp_path / "x" / "items.jsonl")] == ["2", "6", "7"]
    assert len(lines(tmp_path / "x" / "calls.jsonl")) == 1  # nothing was sampled for it


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_model_is_asked_as_it_was_trained(tmp_path, gsm8k, lora_rank):
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(1, 5) for b in range(1, 5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = make_recipe(
        {
            "model": {"name": "tiny-sums", "lora_rank": lora_rank},
            "task": {"name": "math", "files": str(tmp_path / "train.jsonl"), "template": "qwen-boxed", "holdout": 4},
            "rollout": {"rows": 4, "prompts": 2, "group_size": 2, "max_new_tokens": 4},
            "eval": {"every": 0},
            "run": {"steps": 1, "diagnose": 0},
        }
    )
    train(settings, tmp_path / "run", show=False)
    model = tmp_path / "run" / "checkpoints" / "step-000001"
    words = [model, "--bench", "gsm8k", "--gsm8k.subset", "true", "--data", gsm8k, "--max-new-tokens", 4, "--rows", 2]
    done = run(*words, "--out", tmp_path / "same")
    assert done.exit_code == 0 and "trained with" not in done.stderr, done.exception
    assert all(i["prompt"].startswith("<|im_start|>") for i in lines(tmp_path / "same" / "items.jsonl"))
    for n, other in enumerate((["--template", "plain"], ["--gsm8k.template", "plain"])):
        done = run(*words, *other, "--out", tmp_path / f"other{n}")
        assert "prompts are in the template plain, but" in done.stderr and "was trained with qwen-boxed" in done.stderr
    files = [
        "--bench",
        "math",
        "--math.files",
        tmp_path / "train.jsonl",
        "--math.holdout",
        "all",
        "--limit",
        2,
        "--max-new-tokens",
        4,
    ]
    done = run(model, *files, "--template", "plain", "--out", tmp_path / "files")
    assert "was trained with qwen-boxed" in done.stderr


def test_another_training_forgets_the_template(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    model.config.sparse_rl_template = "qwen-boxed"
    save_model(tmp_path / "model", model, tokenizer)
    recipe = {
        "model": {"name": str(tmp_path / "model")},
        "task": {"name": "sums"},
        "eval": {"every": 0},
        "run": {"steps": 1, "diagnose": 0},
    }
    recipe["rollout"] = {"rows": 4, "prompts": 2, "group_size": 2, "max_new_tokens": 4}
    trainer = train(make_recipe(recipe), tmp_path / "run", show=False)
    assert trainer.model.config.sparse_rl_template is None


# ---------- the command


def test_eval_prints_and_writes(tmp_path):
    words = ["tiny-sums", "--bench", "sums,countdown", *SMALL, *SPARSE, "--sums.count", 3, "--out", tmp_path / "x"]
    done = run(*words)
    assert done.exit_code == 0, done.exception
    title, heads, first, second, mean = done.stdout.splitlines()
    assert title.startswith("tiny-sums, rkv 24 (") and title.endswith(f"tokens/s: {tmp_path / 'x'}")
    assert heads.split()[:2] == ["benchmark", "problems"] and first.split()[:4] == ["sums", "10", "x", "2"]
    assert (second.split()[0], mean.split()[0]) == ("countdown", "mean")
    numbers = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert json.loads(run(*words, "--json").stdout) == numbers
    assert numbers["model"] == "tiny-sums" and numbers["cache"] == "rkv 24"
    sums, countdown = numbers["benches"]
    assert sums["problems"] == 10 and sums["pass_at"].keys() == {"1", "2"} and countdown["accuracy"] == 0.0
    asked = json.loads((tmp_path / "x" / "evaluation.json").read_text())
    assert asked["benches"]["sums"]["options"] == {"count": 3} and asked["cache"]["budget"] == 24 and asked["seed"] == 3


def test_the_folder_has_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for more in ([], SPARSE):
        done = run("tiny-sums", "--bench", "sums", "--limit", 2, "--max-new-tokens", 8, *more)
        assert done.exit_code == 0, done.exception
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("evals/*/*")) == [
        "evals/tiny-sums/dense",
        "evals/tiny-sums/rkv-24",
    ]


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.sources, self.text = 0, [], []

    def handle_starttag(self, tag, attributes):
        self.rows += tag == "tr"
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_compare(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    model.lm_head.weight.data.mul_(0.5)  # a worse one
    save_model(
        tmp_path / "_other $x^$<b>", model, tokenizer
    )  # in its picture it is no mathematics, in its page no markup
    words = [
        "--compare",
        "tiny-sums",
        tmp_path / "_other $x^$<b>",
        "--bench",
        "sums,countdown",
        "--compressors",
        "dense,rkv,snapkv",
    ]
    words += ["--budgets", "24,32", "--interval", 4, *SMALL, "--sums.count", 3, "--out", tmp_path / "x"]
    done = run(*words)
    assert done.exit_code == 0, done.exception
    folders = {str(p.parent.relative_to(tmp_path / "x")) for p in tmp_path.glob("x/*/*/items.jsonl")}
    assert (
        len(folders) == 10
        and {f"tiny-sums/{c}" for c in ("dense", "rkv-24", "rkv-32", "snapkv-24", "snapkv-32")} < folders
    )
    parsed = Page()
    parsed.feed((tmp_path / "x" / "compare.html").read_text())
    assert parsed.rows == 3 * (1 + 10)  # three tables: a heading, five caches of two models
    assert len(parsed.sources) == 1 and parsed.sources[0].startswith(
        "data:image/png;base64,"
    )  # nothing outside the page
    assert (tmp_path / "x" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert "39 tests" in "".join(parsed.text)  # 8 + 5 of each table
    assert "_other $x^$<b>" in "".join(parsed.text)
    cells = json.loads(run(*words, "--json").stdout)
    assert len(cells) == 30 and {c["bench"] for c in cells} == {"sums", "countdown", ALL}
    worse = next(c for c in cells if c["bench"] == "sums" and c["cache"] == "dense" and c["better"])
    other = next(name for name in folders if "other" in name).split("/")[0]
    items = {name: lines(tmp_path / "x" / name / "dense" / "items.jsonl") for name in ("tiny-sums", other)}
    means = [sum(i["reward"] >= 1 for i in found if i["bench"] == "sums") / 20 for found in items.values()]
    assert worse["better"]["mean"] == pytest.approx(means[1] - means[0])
    for name in folders:
        assert len(lines(tmp_path / "x" / name / "calls.jsonl")) == 1  # the second command sampled nothing


def test_eval_of_a_folder_with_a_beacon(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    save_model(tmp_path / "student", add_beacon(model, (4, 2)), tokenizer)
    options = [
        tmp_path / "student",
        "--bench",
        "sums",
        "--limit",
        6,
        "--max-new-tokens",
        40,
        "--compressor",
        "beacon",
        "--json",
    ]
    equal, early = (
        json.loads(run(*options, "--chunk", 4, *more, "--out", tmp_path / str(len(more))).stdout)
        for more in ([], ["--threshold", 0.1])
    )
    assert (
        equal["rule"] == "prompt + a beacon per 4 tokens + a chunk"
        and early["rule"] == "prompt + a beacon per 2 to 4 tokens + a chunk"
    )
    assert equal["benches"][0]["tokens_saved"] > 0.2
    with pytest.raises(
        SparseRLError,
        match="a beacon after 16 tokens was asked for, but this student was trained with one after 4 or 2",
    ):
        raise run(*options, "--out", tmp_path / "x").exception


def test_a_reward_that_fails_is_told(tmp_path):
    """Tasks that are graded in processes of their own, which are gone afterwards."""
    (tmp_path / "mine.py").write_text(
        "def prompt(i): return f'{i}+1=', i + 1\ndef reward(answer, text): return 1 // (answer % 2)\n"
    )
    done = run(
        "tiny-sums",
        "--bench",
        tmp_path / "mine.py",
        "--limit",
        8,
        "--max-new-tokens",
        4,
        "--json",
        "--out",
        tmp_path / "x",
    )
    (found,) = json.loads(done.stdout)["benches"]
    assert (
        found["accuracy"] == 0.5
        and found["errors"] == 4
        and "grading failed in" in done.stderr
        and "ZeroDivisionError" in done.stderr
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--chunk", 8],
            "--chunk 8 is for beacons, but the compressor is dense; omit it, or use --compressor beacon.",
        ),
        (["--compressor", "rkv", "--threshold", 0.5], "--threshold 0.5 is for beacons, but the compressor is rkv"),
        (["--compressor", "beacon", "--chunk", 8], "this model has no beacon"),
        (["--compressor", "beacon", "--chunk", 1], "must be a whole number from 2 on"),
        (
            ["--compressor", "beacon:16", "--chunk", 8],
            "beacon:16 has its chunk in its name, but chunk=8 was given too; give it once.",
        ),
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
        (
            ["--compare", "--budgets", "12,x"],
            "--budgets is '12,x'; give whole numbers of at least 1, with commas, such as 128,256.",
        ),
        (["--compare", "--compressors", "rkv"], "has no dense cache to compare with"),
        (["--compare", "--compressors", ","], "--compressors is ','; name at least one."),
        (
            ["--compare", "tiny-sums"],
            "two of tiny-sums, tiny-sums are the same, or would have the same folder; name each model once.",
        ),
        (["--compare", "--budget", 40], "--budget has no meaning with --compare; use --budgets"),
        (["--compare", "--compressor", "snapkv"], "--compressor has no meaning with --compare; use --compressors"),
        (
            ["--compare", "--chunk", 7],
            "--chunk has no meaning with --compare; use --compressors, such as beacon:16 for beacons.",
        ),
        (["--compressors", "dense,rkv"], "--compressors has no meaning without --compare; use --compressor"),
        (["--budgets", 40], "--budgets has no meaning without --compare; use --budget"),
        (["--compressor", "rkv", "--budget", 0], "budget"),
        (["--compressor", "rkv", "--interval", 0], "interval"),
        (["--template", "nosuch"], "there is no template 'nosuch'"),
        (["--template", "chat"], "--template chat is for questions, and sums makes its own prompts; leave it away."),
        (["--compare", "--compressors", "dense,rkw"], "there is no compressor 'rkw'; did you mean 'rkv'"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", "sums", *arguments)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
    assert not list(tmp_path.rglob("items.jsonl"))


@pytest.mark.parametrize(
    "bench, message", [("sums,sums", "each once"), (",", "name at least one"), ("smus", "did you mean 'sums'")]
)
def test_mistakes_in_benchmarks_get_a_sentence(tmp_path, monkeypatch, bench, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", bench)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
