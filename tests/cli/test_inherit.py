"""Settings travel with the model: eval, rollout and generate do as training did, say so, and let options override."""

import json
import logging

import pytest

from sparse_rl import generate, load_model
from sparse_rl.cli.inherit import line_about
from sparse_rl.models import Record, read_record, set_record
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.parts import found_anywhere, with_full_paths
from sparse_rl.train.run import train
from tests.helpers.evaluating import lines
from tests.helpers.runs import recipe, run

TASK = {"name": "sums", "count": 6}
SHORT = ("--limit", 12, "--rows", 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose settings are far from every default."""
    path = tmp_path_factory.mktemp("inherit") / "run"
    settings = recipe(
        run={"steps": 1}, eval={"every": 0, "temperature": 0.9}, task=TASK, rollout={"budget": 40, "max_new_tokens": 56}
    )
    train(settings, path, show=False)
    return path


def evaluated(out, *arguments) -> tuple[list[dict], str]:
    done = run("eval", *arguments, *SHORT, "--out", out)
    assert done.returncode == 0, done.stderr
    return lines(out / "items.jsonl"), done.stderr


def test_without_options_an_evaluation_is_that_with_all_of_them(folder, tmp_path):
    checkpoint = folder / "checkpoints" / "step-000001"
    spelt = ["--bench", "sums", "--sums.count", 6, "--compressor", "rkv", "--budget", 40, "--interval", 4]
    spelt += ["--compressor.protect_prompt", "true", "--max-new-tokens", 56, "--temperature", 0.9]
    alone, told = evaluated(tmp_path / "alone", folder)
    whole, quiet = evaluated(tmp_path / "spelt", checkpoint, *spelt)
    assert alone == whole and any(item["last_entries"] < item["prompt_tokens"] + item["tokens"] for item in whole)
    for part in ("compressor rkv; budget 40; interval 4; protect prompt True", "task sums", "count 6", "stop ids 1"):
        assert part in told
    assert f"taken from {checkpoint}" in told and "budget" not in quiet
    lost, _ = evaluated(tmp_path / "lost", checkpoint, *spelt, "--compressor.protect_prompt=false")
    assert [item["text"] for item in lost] != [item["text"] for item in whole]  # what a forgotten option would change


def test_options_override_what_is_inherited(folder, tmp_path):
    dense, told = evaluated(tmp_path / "dense", folder, "--compressor", "dense", "--sums.count", 3)
    assert all(item["last_entries"] >= item["prompt_tokens"] for item in dense) and "compressor" not in told
    assert "count" not in told.replace("count 3", "count")
    evaluated(tmp_path / "wide", folder, "--budget", 48, "--compressor.protect_prompt", "false")
    cache = json.loads((tmp_path / "wide" / "evaluation.json").read_text())["cache"]
    assert cache == {"compressor": "rkv", "budget": 48, "interval": 4, "options": {"protect_prompt": False}}
    evaluated(tmp_path / "other", folder, "--compressor", "snapkv", "--compressor.window", 4)
    cache = json.loads((tmp_path / "other" / "evaluation.json").read_text())["cache"]  # the prompt stays protected
    assert cache["options"] == {"protect_prompt": True, "window": 4} and cache["budget"] == 40
    free = ["--compressor.protect_prompt", "false"]
    evaluated(tmp_path / "bench", folder, "--bench", "countdown", "--max-new-tokens", 8, *free)
    (asked,) = json.loads((tmp_path / "bench" / "evaluation.json").read_text())["benches"].values()
    assert asked["options"] == {} and asked["temperature"] == 1.0  # another task inherits the cache alone


def test_a_comparison_uses_the_caches_of_its_models(folder, tmp_path):
    done = run("eval", "--compare", folder, "--limit", 4, "--samples", 1, "--out", tmp_path / "x", "--json")
    assert done.returncode == 0, done.stderr
    assert {cell["cache"] for cell in json.loads(done.stdout)} == {"dense", "rkv 40 protect_prompt=True"}
    assert "compressors dense, rkv; budgets 40; interval 4; protect prompt True" in done.stderr


def test_models_that_disagree_are_asked_about(folder, tmp_path):
    model, tokenizer = load_model("tiny-sums")
    for name, changes in {"interval": {"interval": 8}, "task": {"task": "recall"}}.items():
        record = read_record(str(folder / "checkpoints" / "step-000001"))
        set_record(model, Record(**{**record.to_dict(), **changes}))
        save_model(tmp_path / name, model, tokenizer)
    done = run("eval", "--compare", folder, tmp_path / "interval")
    assert done.returncode == 1 and "was trained with interval 4" in done.stderr and "--interval" in done.stderr
    done = run("eval", "--compare", folder, tmp_path / "task")
    assert done.returncode == 1 and "with recall; choose one of them with --bench" in done.stderr
    done = run("eval", "tiny-sums")
    assert done.returncode == 1 and "choose one with --bench" in done.stderr


def test_a_record_does_not_run_a_python_file(folder, tmp_path, monkeypatch):
    """It may be a stranger's: a task or compressor that only the record names needs --trust."""
    ran = tmp_path / "ran"
    task = tmp_path / "task.py"
    task.write_text(
        f"open({str(ran)!r}, 'a').close()\n"
        "def prompt(i): return f'{i % 10}+1=', i\ndef reward(answer, text): return 1.0\n"
    )
    model, tokenizer = load_model("tiny-sums")
    set_record(model, Record(task=str(task), max_new_tokens=4))
    save_model(tmp_path / "m", model, tokenizer)
    words = ["eval", tmp_path / "m", "--limit", 2, "--out", tmp_path / "out"]
    done = run(*words)
    assert done.returncode == 1 and "--trust" in done.stderr and "--bench" in done.stderr and not ran.exists()
    done = run(*words, "--trust")
    assert done.returncode == 0 and ran.exists(), done.stderr
    monkeypatch.chdir(tmp_path)
    done = run(*words[:-1], tmp_path / "named", "--bench", "task.py")  # by the user; its way to sample is inherited
    assert done.returncode == 0, done.stderr
    (asked,) = json.loads((tmp_path / "named" / "evaluation.json").read_text())["benches"].values()
    assert asked["max_new_tokens"] == 4
    set_record(model, Record(compressor=str(task), budget=40))
    save_model(tmp_path / "c", model, tokenizer)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    ran.unlink()
    for command in (
        ["eval", tmp_path / "c", "--bench", "sums"],
        ["eval", "--compare", tmp_path / "c", "--bench", "sums"],
        ["rollout", tmp_path / "c", "--prompts", tmp_path / "prompts.jsonl"],
    ):
        done = run(*command)
        assert done.returncode == 1 and "--trust" in done.stderr and not ran.exists()
    with pytest.raises(Exception, match="name it yourself"):
        generate(*load_model(str(tmp_path / "c")), "1+1=")


def test_rollout_inherits(folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2+3+4=?\\n"}\n')
    words = ["--prompts", tmp_path / "p.jsonl", "--group-size", 3]
    spelt = ["--compressor", "rkv", "--budget", 40, "--interval", 4, "--compressor.protect_prompt", "true"]
    done = run("rollout", folder, *words, "--out", tmp_path / "a")
    assert done.returncode == 0 and "compressor rkv; budget 40; interval 4; protect prompt True; max new" in done.stderr
    again = run("rollout", folder, *words, "--out", tmp_path / "b", *spelt, "--max-new-tokens", 56)
    assert again.returncode == 0 and "budget" not in again.stderr
    assert lines(tmp_path / "a" / "trajectories.jsonl") == lines(tmp_path / "b" / "trajectories.jsonl")
    wrong = run("rollout", folder, *words, "--rollout.budget", 3)
    assert wrong.returncode == 1 and "no option --rollout.budget" in wrong.stderr


def test_rollout_puts_texts_into_the_template_of_training(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    set_record(model, Record(template="qwen-boxed", max_new_tokens=2))
    save_model(tmp_path / "m", model, tokenizer)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2"}\n')
    prompts = {}
    for name, more in {"own": [], "plain": ["--template", "plain"]}.items():
        done = run("rollout", tmp_path / "m", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
        (line,) = lines(tmp_path / name / "trajectories.jsonl")
        prompts[name] = line["prompt"]
    assert prompts["plain"] == "1+2" and prompts["own"].startswith("<|im_start|>system") and "1+2" in prompts["own"]


def test_generate_inherits(folder, caplog):
    model, tokenizer = load_model(str(folder))
    texts = ["1+2+3+4+5+6=?\n", "9+9+9+9+9+9=?\n"]
    with caplog.at_level(logging.WARNING, "sparse_rl"):
        own = generate(model, tokenizer, texts, max_new_tokens=64)
        assert own == generate(model, tokenizer, texts, max_new_tokens=64)
    assert [record.getMessage() for record in caplog.records] == [
        "the cache of the model's training is used: rkv, budget 40, interval 4, protect_prompt True"
    ]
    options = {"protect_prompt": True}
    assert own == generate(model, tokenizer, texts, "rkv", 40, 4, max_new_tokens=64, compressor_options=options)


def test_a_users_own_compressor_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from sparse_rl.compressors import ScoreCompressor\n"
        "class Mine(ScoreCompressor):\n"
        "    def score(self, view):\n"
        "        return view.feed.float()\n"
    )
    monkeypatch.chdir(tmp_path)
    small = {"prompts": 2, "group_size": 2, "max_new_tokens": 8, "compressor": "mine.py:Mine"}
    train(recipe(run={"steps": 1}, eval={"every": 0}, rollout=small), tmp_path / "run", show=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = ["eval", tmp_path / "run", "--limit", 2]
    done = run(*words)
    assert done.returncode == 1 and f"{tmp_path / 'mine.py'}:Mine" in done.stderr and "--trust" in done.stderr
    done = run(*words, "--trust", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_the_line_about_what_is_taken_is_short_and_steers_no_terminal():
    line = line_about(["m"], [("template", "x" * 90_000), ("stop_ids", list(range(9000))), ("task", "\x1b[2Jgone\n")])
    assert len(line) < 1000 and line.isprintable() and "(90,000 characters)" in line and "stop ids 0, 1, 2" in line


def test_a_checkpoint_finds_its_task_files_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "label": "{i + 1}"}}\n' for i in range(8)))
    for files in ("sums.jsonl", ["sums.jsonl", "hub:someone/sums"]):
        found = with_full_paths({"files": files, "holdout": 2})
        first = found["files"] if isinstance(files, str) else found["files"][0]
        assert first == str(tmp_path / "sums.jsonl") and found["holdout"] == 2
        assert isinstance(files, str) or found["files"][1] == "hub:someone/sums"
    assert with_full_paths({"count": 3}) == {"count": 3}


def test_a_compressors_file_is_recorded_with_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert found_anywhere("rkv") == "rkv" and found_anywhere("prompt-only:rkv") == "prompt-only:rkv"
    assert found_anywhere("mine.py") == f"{tmp_path}/mine.py"
    assert found_anywhere("mine.py:Loud") == f"{tmp_path}/mine.py:Loud"
    assert found_anywhere("prompt-only:mine.py:Loud") == f"prompt-only:{tmp_path}/mine.py:Loud"
