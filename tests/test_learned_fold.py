"""The benchmark of learned folds at the smallest size: it is cut, goes on, and its table has what is newest."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import learned_fold


def test_a_stay_that_is_cut_measures_what_it_has_reached_and_the_next_goes_on(tmp_path, monkeypatch, capsys):
    keys = {"task.count": "2", "rollout.max_new_tokens": "12", "rollout.rows": "4", "rollout.prompts": "2"}
    study = learned_fold.STUDIES["sums"]
    small = {**study.keys, **keys, "rollout.group_size": "2", "run.checkpoint_every": "1"}
    study = learned_fold.Study("tiny-sums", "tiny-sums", small, 4, (4,), {"run.steps": "1"}, {}, (0.0,), 2)
    monkeypatch.setitem(learned_fold.STUDIES, "sums", study)

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["learned_fold.py", "--out", str(tmp_path / "fold"), *words])
        learned_fold.main()
        return capsys.readouterr().out

    def rows() -> list[tuple]:
        return [(r["arm"], r["when"], r["steps"]) for r in learned_fold.read(tmp_path / "fold" / "points.jsonl")]

    for words, message in (
        ((), "nothing to do"),
        (("--arms",), "has no student yet"),
        (("--table",), "no measurement"),
    ):
        with pytest.raises(SystemExit) as stop:
            call(*words)
        assert message in f"{stop.value.code} {capsys.readouterr().err}"

    call("--student")
    study.arms["run.steps"] = "1"
    train = learned_fold.train

    def cut(args, name, given):  # after its first step the run is stopped
        train(args, name, given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(learned_fold, "train", cut)
        patched.setattr(learned_fold.Stay, "train", stopped_at_once)
        call("--arms", "--only", "c = 4")
    assert rows() == [("c = 4", "before", 0), ("c = 4", "after", 1)]
    study.arms["run.steps"] = "2"
    told = call("--student", "--arms", "--table")
    new = [("chosen, price 0", "before", 0), ("c = 4", "after", 2), ("chosen, price 0", "after", 2)]
    assert rows()[2:] == new and "| c = 4 | after | 2 |" in told and "| c = 4 | after | 1 |" not in told
    call("--arms")
    assert len(rows()) == 5  # nothing is done twice
    assert all(0 <= json.loads(line)["accuracy"] <= 1 for line in (tmp_path / "fold" / "points.jsonl").open())


def stopped_at_once(stay, work) -> bool:
    try:
        work()
    except KeyboardInterrupt:
        return False
    return True
