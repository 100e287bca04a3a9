"""The first hour of a new user, on a CPU, from a bare clone: every command ends well, and none shows a traceback.

    python -m pytest tests/first_hour.py -m slow

The user has a JSONL file of problems, a model and a tokenizer of their own, a task, a reward and a compressor of their
own; trains adapters, stops and goes on, evaluates, exports, and looks at a report. The steps are tests in their order,
in one folder: what a step needs, an earlier one made.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparse_rl.cli.main import app

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
STEP = ["--rollout.prompts", 2, "--rollout.group_size", 2, "--learn.minibatches", 1, "--eval.prompts", 2]

RECIPE = r"""
model: {name: my-model, lora_rank: 4}
task: {name: math, files: problems.jsonl, prompt: question, answer: answer, holdout: 8,
       suffix: "\nPut the answer in \\boxed{}."}
rollout: {compressor: rkv, budget: 24, interval: 8, rows: 8, prompts: 2, group_size: 2, max_new_tokens: 24}
learn: {method: shadow, minibatches: 1}
eval: {every: 1, prompts: 4}
run: {steps: 2, checkpoint_every: 1, diagnose: 1, samples: 2, trackers: [tensorboard]}
"""
TASK = """
def prompt(i): return f"{i % 9}+{i % 7}=", i % 9 + i % 7
def reward(answer, text): return {"correct": float(str(answer) in text), "brief": -len(text) / 1000}
def right(reward, parts): return parts["correct"] == 1
def solution(answer): return str(answer)
SIZE = 60
"""
COMPRESSOR = """
from sparse_rl import ScoreCompressor

class Newest(ScoreCompressor):
    def score(self, view):
        return view.feed.float()
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The repository as `git clone` gives it: nothing that was not committed."""
    folder = tmp_path_factory.mktemp("clone") / "sparse-rl"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The user's folder, with their problems, model, task and compressor."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"question": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(64)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(RECIPE)
    (folder / "my_task.py").write_text(TASK)
    (folder / "newest.py").write_text(COMPRESSOR)
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<unk>", "<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [*(row["question"] for row in rows), *map(str, range(150)), "\\boxed{}"]
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "my-model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder / "my-model")
    return folder


@pytest.fixture
def sparse_rl(clone, home):
    """Run a command of the clone in the user's folder; it must end well, and show no traceback."""

    def command(*arguments: object) -> str:
        environment = {**os.environ, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        line = [sys.executable, "-m", "sparse_rl", *map(str, arguments)]
        done = subprocess.run(line, cwd=home, env=environment, capture_output=True, text=True, timeout=1200)
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "Traceback" not in said, f"{' '.join(line[2:])}\n{said}"
        return said

    return command


def newest(home: Path, run: str) -> Path:
    return sorted((home / run / "checkpoints").glob("step-*"))[-1]


def has(command: str) -> bool:
    """Whether this version has a command."""
    return any((c.name or c.callback.__name__) == command for c in app.registered_commands if c.callback)


def test_look_around(sparse_rl, clone, home):
    where = [sys.executable, "-c", "import sparse_rl; print(sparse_rl.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    found = subprocess.run(where, cwd=home, env=environment, capture_output=True, text=True).stdout
    assert found.startswith(str(clone))
    assert "sparse-rl" in sparse_rl("--version") and "train" in sparse_rl("--help")
    for what in ("recipes", "tasks", "compressors", "presets", "templates", "keys"):
        sparse_rl("list", what)


def test_the_demo(sparse_rl, home):
    assert "shadow" in sparse_rl("demo") or (home / "runs" / "demo").is_dir()


def test_does_it_fit(sparse_rl):
    assert "fits" in sparse_rl("plan", "--recipe", "mine.yaml", "--gpu-memory", 24)
    said = sparse_rl("plan", "--recipe", "qwen2.5-1.5b-simplerl", "--gpu-memory", 24)
    assert "does not fit" in said and "--model.lora_rank 32" in said


def test_train_adapters_on_own_problems_and_go_on(sparse_rl, home):
    assert "2 steps done" in sparse_rl("train", "mine.yaml", "--out", "runs/mine")
    assert "3 steps done" in sparse_rl("train", "runs/mine", "--resume", "--run.steps", 3)
    assert list((home / "runs" / "mine" / "sparse-rl").rglob("events.out.*"))  # TensorBoard's


def test_evaluate_as_it_was_trained(sparse_rl, home):
    (home / "ask.jsonl").write_text(json.dumps({"prompt": "What is 2 + 3?"}) + "\n")
    said = sparse_rl(
        "eval", newest(home, "runs/mine"), "--bench", "math", "--math.files", "problems.jsonl", "--math.prompt",
        "question", "--math.answer", "answer", "--math.holdout", 4, "--limit", 4, "--max-new-tokens", 16,
    )  # fmt: skip
    assert "rkv" in said and "24" in said  # the cache of training, without being told
    sparse_rl("rollout", newest(home, "runs/mine"), "--prompts", "ask.jsonl", "--out", "asked", "--max-new-tokens", 8)


def test_export_and_merge(sparse_rl, home):
    if not has("export"):
        pytest.skip("this version has no `sparse-rl export`")
    from transformers import AutoModelForCausalLM

    sparse_rl("export", newest(home, "runs/mine"), "--to", "exported")
    sparse_rl("export", newest(home, "runs/mine"), "--merge", "--to", "merged")
    assert AutoModelForCausalLM.from_pretrained(home / "merged").num_parameters() > 0  # without our package
    sparse_rl("eval", "merged", "--bench", "my_task.py", "--limit", 2, "--max-new-tokens", 8)


def test_own_task_and_rewards(sparse_rl, home):
    keys = ["--rollout.max_new_tokens", 12, "--eval.every", 1, "--run.steps", 1, *STEP]
    own = {"model": {"name": "my-model"}, "task": {"name": "my_task.py"}, "rollout": {"budget": 24, "interval": 8}}
    (home / "task.yaml").write_text(json.dumps({**own, "run": {"diagnose": 1}, "warmup": {"steps": 2, "batch": 4}}))
    sparse_rl("warmup", "task.yaml", "--out", "models/warm", "--eval.prompts", 2, "--rollout.max_new_tokens", 8)
    sparse_rl("train", "task.yaml", "--out", "runs/task", "--model.name", "models/warm", *keys)
    lines = [json.loads(line) for line in (home / "runs/task/metrics.jsonl").read_text().splitlines()]
    assert any("correct" in key for line in lines for key in line)  # every named reward is logged


def test_own_compressor(sparse_rl, home):
    keys = ["--rollout.compressor", "newest.py", "--run.steps", 1, "--run.trackers", "[]"]
    sparse_rl("train", "mine.yaml", "--out", "runs/newest", *keys)
    sparse_rl(
        "eval", "my-model", "--bench", "my_task.py", "--compressor", "newest.py", "--budget", 24, "--interval", 8,
        "--limit", 2, "--max-new-tokens", 40,
    )  # fmt: skip


def test_compare_budgets(sparse_rl):
    sparse_rl(
        "eval", "--compare", "tiny-sums", "--bench", "sums", "--compressors", "dense,rkv", "--budgets", "32,46",
        "--interval", 4, "--limit", 8,
    )  # fmt: skip


def test_look_at_the_runs(sparse_rl, home):
    sparse_rl("report", "runs/mine", "runs/newest", "-o", "report.html")
    assert "<html" in (home / "report.html").read_text()[:2000].lower()
    sparse_rl("report", "runs/mine", "--format", "md", "-o", "report.md")
    assert "mine" in (home / "report.md").read_text()
