"""`sparse-rl eval`: benchmarks are asked as published or as trained, and mistakes get a sentence."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparse_rl import SparseRLError, load_model
from sparse_rl.beacon import add_beacon
from sparse_rl.config import make_recipe
from sparse_rl.evaluation import Cache
from sparse_rl.evaluation.compare import ALL
from sparse_rl.evaluation.run import Asked, evaluate
from sparse_rl.models import record_of
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.run import train
from tests.helpers.evaluating import SMALL, SPARSE, lines, run

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
    assert any(f"{room:,} new tokens, not 8,192" in line for line in said)
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
    if lora_rank:  # what an adapter's folder says was read; what is said about it is the same
        return
    for n, other in enumerate((["--template", "plain"], ["--gsm8k.template", "plain"])):
        done = run(*words, *other, "--out", tmp_path / f"other{n}")
        assert "prompts use the template plain, but" in done.stderr and "was trained with qwen-boxed" in done.stderr
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
    assert record_of(trainer.model).template is None


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
    save_model(tmp_path / "_other $x^$<b>", model, tokenizer)  # not mathematics in the picture, not markup in the page
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
        match="a beacon after every 16 tokens was requested, but this student was trained with one after every 4 or 2",
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
            "beacon:16 sets chunk already, but chunk=8 was given too; give it once.",
        ),
        (
            ["--compressor", "beacon", "--compressor.sinks", 8],
            "beacon has no parameter 'sinks'; known: chunk",
        ),
        (["--compressor", "rkv", "--compressor.snks", 8], "rkv has no parameter 'snks'; did you mean 'sinks'"),
        (
            ["--rollout.budget", 3],
            "eval has no option --rollout.budget (benchmarks and compressors have --sums.KEY VALUE,",
        ),
        (["--budgt", 3], "did you mean 'budget'"),
        (["--sums.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["--task.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["--task.count"], "--task.count has no value"),
        (["tiny"], "2 models were given; give one, or add --compare to compare several."),
        (["--limit", 0], "limit is 0; it must be a whole number of at least 1."),
        (["--samples", 0], "samples is 0"),
        (["--max-new-tokens", 0], "max_new_tokens"),
        (
            ["--compare", "--budgets", "12,x"],
            "--budgets is '12,x'; give whole numbers of at least 1, with commas, such as 128,256.",
        ),
        (["--compare", "--compressors", "rkv"], "has no dense cache to compare with"),
        (["--compare", "--compressors", ","], "--compressors is ','; give at least one name."),
        (
            ["--compare", "tiny-sums"],
            "two of tiny-sums, tiny-sums are the same model, or would write to the same folder; give each model once.",
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
        (["--template", "chat"], "--template chat is for questions, but sums writes its own prompts; omit it."),
        (["--compare", "--compressors", "dense,rkw"], "there is no compressor 'rkw'; did you mean 'rkv'"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", "sums", *arguments)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
    assert not list(tmp_path.rglob("items.jsonl"))


@pytest.mark.parametrize(
    "bench, message",
    [("sums,sums", "name each benchmark or task once"), (",", "name at least one"), ("smus", "did you mean 'sums'")],
)
def test_mistakes_in_benchmarks_get_a_sentence(tmp_path, monkeypatch, bench, message):
    monkeypatch.chdir(tmp_path)
    done = run("tiny-sums", "--bench", bench)
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception)
