"""A user's own compressor and advantage estimator: named by their file, in recipes and in every command."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from sparse_rl import Engine, NonFiniteLogits, Sampling, SparseRLError, load_model
from sparse_rl.compressors import make
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.kernels import ops
from sparse_rl.learn.advantage import advantage, find_estimator
from tests.helpers.runs import run, write_recipe

MINE = """
from sparse_rl import ScoreCompressor

class Newest(ScoreCompressor):
    def __init__(self, sign: float = 1.0, **options):
        super().__init__(**options)
        self.sign = sign

    def score(self, view):
        return self.sign * view.feed.float()
"""
SIGN = """
def advantage(group, eps): return group.centred.sign()
def double(group, eps): return 2 * group.centred
def short(group, eps): return group.centred[:1]
NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def sampled(compressor, **options):
    model, tokenizer = load_model("tiny-sums")
    engine = Engine(model, make(compressor, **options), budget=16, interval=4, rows=4)
    return engine.generate([tokenizer.encode("1+2+3=")], 2, Sampling(24, stop_ids=()))


def test_a_file_is_the_compressor_that_it_defines(mine):
    named, window = sampled(f"{mine}:Newest"), sampled("window", sinks=0)
    for ours, theirs in zip(named, window, strict=True):  # the newest slots are a sliding window
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.trace.evicted_at, theirs.trace.evicted_at)
    other = sampled(mine, sign=-1.0)
    assert not torch.equal(other[0].trace.evicted_at, named[0].trace.evicted_at)
    assert make(mine).name == "Newest" and make(f"prompt-only:{mine}").name == "prompt-only:Newest"


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (None, "", "there is no file .*mine.py; name your own compressor"),
        ("x = 1", "", "defines no compressor; write a subclass of ScoreCompressor"),
        (MINE + MINE.replace("Newest", "Other"), "", "defines Newest, Other; name one: mine.py:Newest"),
        (MINE, ":Newst", "has no compressor 'Newst'; did you mean 'Newest'"),
        ("1 / 0", "", "cannot be loaded: ZeroDivisionError"),
        (MINE.replace("def score", "def scores"), "", "Newest must define score"),
    ],
)
def test_mistakes_in_the_file_get_a_sentence(tmp_path, source, name, said):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(SparseRLError, match=said):
        make(f"{tmp_path / 'mine.py'}{name}")


@pytest.mark.parametrize("around", ["{}", "prompt-only:{}"])
@pytest.mark.parametrize(
    ("body", "line", "said"),
    [
        ("return view.feed.float() / (1 // 0)", 10, "failed: ZeroDivisionError: .* by zero.$"),
        ("return self.missing", 10, "failed: AttributeError: 'Newest' object has no attribute 'missing'.$"),
        ("return view.feed @ view.feed", 10, "failed: RuntimeError"),
        ("return None", 9, r"returned NoneType; it must return a tensor \[\d+, \d+, \d+\]: a score per"),
        ("return view.feed[..., :1]", 9, r"returned a tensor \[\d+, \d+, 1\]; it must return a tensor \[\d+, \d+, "),
        ("return view.feed * float('nan')", 9, "returned NaN although the keys are finite"),
        ("return (view.feed - 9).float().sqrt()", 9, "returned NaN"),
    ],
)
def test_a_mistake_in_a_score_gets_a_sentence_with_its_line(tmp_path, body, line, said, around):
    (tmp_path / "mine.py").write_text(MINE.replace("return self.sign * view.feed.float()", body))
    with pytest.raises(SparseRLError, match=rf"Newest.*mine.py, line {line}\) {said}") as caught:
        model, tokenizer = load_model("tiny-sums")
        engine = Engine(model, make(around.format(tmp_path / "mine.py")), budget=16, interval=4, rows=4)
        engine.generate([tokenizer.encode("1+2+3+4+5+6+7+8+9+1+2+3+4+5=")], 2, Sampling(24, stop_ids=()))
    assert "\n" not in str(caught.value)


def test_a_score_or_a_constructor_that_cannot_be_called(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.replace("def score(self, view)", "def score(view)"))
    with pytest.raises(SparseRLError, match=r"Newest \(.*mine.py, line 9\) failed: TypeError: .*takes 1 positional"):
        sampled(str(tmp_path / "mine.py"))
    (tmp_path / "other.py").write_text(MINE.replace("self.sign = sign", "self.sign = 1 / 0"))
    with pytest.raises(
        SparseRLError, match=r"other.py, line 7\) cannot be made with the parameters {}: ZeroDivisionError"
    ):
        make(str(tmp_path / "other.py"))


def test_keep_that_returns_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(MINE + "\n    def keep(self, view, budget): pass\n")
    with pytest.raises(SparseRLError, match=r"Newest.keep must return int64 slot numbers \[.*\], not NoneType"):
        sampled(str(tmp_path / "mine.py"))


def test_nan_where_it_does_not_matter_and_nan_keys_are_not_refused(tmp_path):
    last = "return view.feed.float().masked_fill(view.feed == view.feed[..., -1:], float('nan'))"
    (tmp_path / "mine.py").write_text(MINE.replace("return self.sign * view.feed.float()", last))
    assert len(sampled(str(tmp_path / "mine.py"), window=2)) == 2
    with pytest.raises(SparseRLError, match="returned NaN"):
        sampled(str(tmp_path / "mine.py"))
    model, tokenizer = load_model("tiny-sums")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        engine = Engine(model, make(str(tmp_path / "mine.py")), budget=16, interval=4, rows=4)
        engine.generate([tokenizer.encode("1+2+3+4+5+6+7+8+9+1+2+3+4+5=")], 2, Sampling(24, stop_ids=()))


def test_nan_is_refused_where_checks_wait_for_the_next_sync(tmp_path, monkeypatch):
    monkeypatch.setitem(ops.RULES, "cpu", replace(ops.RULES["cpu"], defers_checks=True))
    (tmp_path / "mine.py").write_text(MINE.replace("view.feed.float()", "view.feed * float('nan')"))
    with pytest.raises(SparseRLError, match=r"Newest.score \(.*mine.py, line 9\) returned NaN"):
        sampled(str(tmp_path / "mine.py"))


def test_a_run_that_a_score_ends_is_saved(tmp_path):
    after = "if CALLS.append(1) or len(CALLS) > LIMIT: return 1 / 0\n        return self.sign * view.feed.float()"
    source = MINE.replace("return self.sign * view.feed.float()", after) + "\nCALLS = []\nLIMIT = "
    rollout = {"compressor": str(tmp_path / "mine.py"), "compressor_options": {}, "budget": 24}
    few = {"steps": 3, "checkpoint_every": 9, "diagnose": 0, "samples": 0}
    given = write_recipe(tmp_path, rollout=rollout, run=few, eval={"every": 0})
    (tmp_path / "mine.py").write_text(source + "10**9")
    told = run("train", given, "--out", tmp_path / "whole", "--run.steps", 1)
    assert told.returncode == 0, told.stderr
    calls = max(
        len(getattr(m, "CALLS", ())) for name, m in sys.modules.items() if name.startswith("sparse_rl_file_mine_")
    )
    (tmp_path / "mine.py").write_text(source + str(calls))  # it fails in the second step
    told = run("train", given, "--out", tmp_path / "run")
    assert told.returncode == 1 and "line 10) failed: ZeroDivisionError" in told.stderr, told.stderr
    assert [step for step, _ in find_checkpoints(tmp_path / "run" / "checkpoints")] == [1]


def test_every_command_takes_the_file(mine, tmp_path):
    small = ("--budget", 16, "--interval", 4)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2+3="}\n')
    where = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "rollouts", "--max-new-tokens", 8)
    told = run("rollout", "tiny-sums", *where, "--compressor", mine, *small)
    assert told.returncode == 0, told.stderr
    told = run("plan", "--model", "tiny-sums", "--compressor", mine, *small)
    assert told.returncode == 0, told.stderr
    few = ("--bench", "sums", "--limit", 4, "--max-new-tokens", 8, "--rows", 4, "--interval", 4)
    one = (*few, "--compressor", f"{mine}:Newest", "--budget", 24, "--compressor.sign", -1)
    told = run("eval", "tiny-sums", *one, "--out", tmp_path / "e")
    assert told.returncode == 0 and "mine.py:Newest 24 sign=-1" in told.stdout, told.stderr
    both = (*few, "--compare", "--compressors", f"dense,{mine}", "--budgets", 24, "--out", tmp_path / "c")
    told = run("eval", "tiny-sums", *both, "--json")
    assert told.returncode == 0 and "mine.py 24" in [cell["cache"] for cell in json.loads(told.stdout)], told.stderr
    assert (tmp_path / "c" / "tiny-sums" / "mine.py-24").is_dir()


def test_a_run_uses_both_files_and_its_folder_does_not_run_them_unasked(mine, tmp_path):
    (tmp_path / "sign.py").write_text(SIGN)
    rollout = {"compressor": f"{mine}:Newest", "compressor_options": {"sign": -1.0}, "budget": 24}
    learn = {"advantage": str(tmp_path / "sign.py"), "method": "none", "minibatches": 1}
    few = {"steps": 1, "checkpoint_every": 1, "diagnose": 0, "samples": 1}
    given = write_recipe(tmp_path, rollout=rollout, learn=learn, run=few, eval={"every": 0})
    told = run("train", given, "--out", tmp_path / "run")
    assert told.returncode == 0, told.stderr
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["cache/tokens_saved/frac"] > 0
    moved = 1 - line["advantage/groups_without_variance/frac"]
    assert line["advantage/abs/mean"] == pytest.approx(moved)  # signs: 1 in every group that has variance
    more = ("--resume", "--run.steps", 2)
    for own in ((), ("--rollout.compressor", f"{mine}:Newest")):  # both files must be trusted or named
        told = run("train", tmp_path / "run", *more, *own)
        assert told.returncode == 1 and "names the Python file" in told.stderr and "--trust" in told.stderr
    told = run("train", tmp_path / "run", *more, "--trust")
    assert told.returncode == 0, told.stderr


def test_an_estimator_is_a_function_of_a_file(tmp_path):
    (tmp_path / "sign.py").write_text(SIGN)
    rewards, group = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    assert advantage(rewards, group, str(tmp_path / "sign.py"))[0].tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert advantage(rewards, group, f"{tmp_path / 'sign.py'}:double")[0].tolist() == [-2.0, 2.0, 0.0, 0.0]
    with pytest.raises(SparseRLError, match=r"returned \[1\]; it must be a tensor \[4\]"):
        advantage(rewards, group, f"{tmp_path / 'sign.py'}:short")
    for name, said in ((":NUMBER", "has no function NUMBER"), (":none", "has no function none")):
        with pytest.raises(SparseRLError, match=said):
            find_estimator(f"{tmp_path / 'sign.py'}{name}")
    with pytest.raises(SparseRLError, match="there is no file"):
        find_estimator(str(tmp_path / "other.py"))
