"""The folder of an evaluation: what is written, and how one that was killed or interrupted continues."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from sparse_rl import Engine, Sampling, SparseRLError, load_model, tasks
from sparse_rl.evaluation import Exam, Results
from sparse_rl.evaluation.ask import fingerprint
from sparse_rl.records import entries, kv_tokens_saved
from tests.helpers.evaluating import SPARSE, asked_again, exam, lines, run
from tests.helpers.runs import PATIENCE, command_that_is_stopped

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
        12,
        "--samples",
        2,
        "--max-new-tokens",
        48,
        "--rows",
        2,
        *SPARSE,
    ]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    path = killed / "completions.jsonl"
    stopped = command_that_is_stopped(number, path, 6, "eval", *words, "--out", killed)
    done = subprocess.run(stopped, capture_output=True, text=True, timeout=PATIENCE)
    if number == signal.SIGTERM:
        assert done.returncode == 130 and "the same command continues" in done.stderr
    kept = path.read_bytes()
    assert 6 <= kept.count(b"\n") < 24  # it was killed in the middle
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
