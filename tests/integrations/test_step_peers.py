"""benchmarks/step_peers.py: all columns sample the same prompts to one length, and a missing peer is a sentence."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import peers
import step_peers
from peers import missing
from step_peers import Rounds, check, digest, made_prompts, with_rest


def test_the_benchmark_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Weights are made by a process of its own; the columns run here, to save their imports."""
    pytest.importorskip("trl", minversion="1.12")
    pytest.importorskip("datasets")
    alone = step_peers.run_column

    def run_column(column, folder, args):
        if column in ("model", "trl-vllm"):
            return alone(column, folder, args)
        step_peers.column_main(column, folder, args.set)

    monkeypatch.setattr(step_peers, "run_column", run_column)
    monkeypatch.setattr(peers, "missing", lambda python, path, modules: "vllm")  # wherever the tests run
    command = ["step_peers.py", "--tiny", "--out", str(tmp_path), "--columns", "shadow,trl-vllm,trl-sparse,trl-replay"]
    monkeypatch.setattr(sys, "argv", command)
    step_peers.main()
    said = capsys.readouterr().out
    assert f"trl-vllm is left out: {sys.executable} has no vllm; name one" in said
    settings = step_peers.TINY
    found = {c: json.loads((tmp_path / f"{c}.json").read_text()) for c in ("shadow", "trl-sparse", "trl-replay")}
    for column in found.values():
        assert len(column["steps"]) == settings.steps
        assert check([found["shadow"], column], settings) == []  # prompts and lengths
        for step in column["steps"]:
            seconds = step["seconds"]
            assert all(seconds[stage] > 0 for stage in ("rollout", "score", "update", "step")), seconds
            assert sum(seconds[stage] for stage in step_peers.STAGES[:-1]) == pytest.approx(seconds["step"])
    prompts = [step["prompts"] for step in found["shadow"]["steps"]]
    assert len(set(prompts)) == settings.steps  # another step has others
    table = (tmp_path / "table.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == list(found)
    monkeypatch.setattr(step_peers, "run_column", lambda *_: pytest.fail("what is there is not measured again"))
    monkeypatch.setattr(sys, "argv", [*command[:-1], "shadow"])
    step_peers.main()
    monkeypatch.setattr(sys, "argv", [*command, "--new", "30"])
    with pytest.raises(SystemExit):
        step_peers.main()
    assert "holds other settings" in capsys.readouterr().err


def test_a_column_that_differs_is_told():
    def column(name: str, prompts: str, lengths: tuple[int, int]) -> dict:
        return {"column": name, "steps": [{"prompts": prompts, "lengths": lengths}]}

    settings = step_peers.TINY
    same, other = column("shadow", "a", (20, 20)), column("trl-vllm", "b", (7, 20))
    assert check([same, same], settings) == []
    assert check([same, other], settings) == [
        "trl-vllm: completions have [7, 20] tokens instead of 20.",
        "trl-vllm had other prompts than shadow.",
    ]


def test_prompts_are_counted_once_and_follow_the_settings():
    assert digest([[1, 2], [1, 2], [3]]) == digest([[1, 2], [3], [3]]) != digest([[3], [1, 2]])
    assert digest([[1, 2], [1, 2], [3]])[1] == 1.5
    settings = step_peers.Settings()
    lengths = list(map(len, made_prompts(settings)))
    assert len(lengths) == 96 and min(lengths) >= 150 and max(lengths) <= 450
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.1)


def test_stages_of_trl():
    """Two steps of two optimizer steps: what is neither generating nor scoring is the update, or between them."""
    rounds = Rounds(minibatches=2)
    rounds.begins, rounds.ends = [0.0, 11.0, 14.0, 20.0], [10.0, 13.0, 19.0, 22.0]
    rounds.generating, rounds.scoring = [4.0, 1.0], [7.0, 2.0]
    rounds.sampled = [([[1, 2]], [[3] * 5])] * 2
    first, second = (step.seconds for step in rounds.steps())
    assert first == {"rollout": 4.0, "score": 3.0, "update": 5.0, "rest": 2.0, "step": 14.0}
    assert second == {"rollout": 1.0, "score": 1.0, "update": 5.0, "rest": 1.0, "step": 8.0}
    assert with_rest({"rollout": 1.0, "score": 2.0, "update": 3.0, "step": 7.0})["rest"] == 1.0


def test_what_an_interpreter_lacks():
    assert missing(sys.executable, None, ("json", "no_such_module")) == "no_such_module"
    assert missing(sys.executable, None, ("json",)) is None
