"""The examples in the documents run, and say what they claim."""

import re
from pathlib import Path

import pytest
import torch

import sparse_rl
from sparse_rl import COMPRESSORS, token_logprobs
from tests.helpers.compressors import BY_NAME

ROOT = Path(__file__).parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def python_blocks(path: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "docs/python.md"])
def test_the_example_of_a_replay_runs(path, capsys):
    code, *_ = python_blocks(path)
    names: dict = {}
    exec(compile(code, path, "exec"), names)
    assert len(names["trajectories"]) == 8
    gap = (names["replayed"].cpu() - names["t"].sampler_logprobs)[names["t"].num_prompt_tokens :].abs().max()
    assert gap < 1e-5
    assert "tensor(" in capsys.readouterr().out


def test_the_example_of_a_beacon_runs(capsys):
    _, _, code, _ = python_blocks("docs/python.md")
    names: dict = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    t = names["t"]
    assert int((t.tokens == t.beacon_id).sum()) == max(0, len(t.response_tokens) - 2) // 16
    assert capsys.readouterr().out.strip() == names["tokenizer"].decode(t.response_tokens).strip()


def test_the_example_of_text_runs(capsys):
    from sparse_rl import Engine, Sampling

    *_, code = python_blocks("docs/python.md")
    names: dict = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    model, tokenizer, sums, answers = (names[name] for name in ("model", "tokenizer", "sums", "answers"))
    engine = Engine(model, compressor="rkv", budget=40, interval=4)
    expected = engine.generate([tokenizer.encode(text) for text in sums], sampling=Sampling(80, temperature=0.0))
    assert answers == [tokenizer.decode(t.response_tokens, skip_special_tokens=True) for t in expected]
    assert any((t.trace.evicted_at.long() < len(t.tokens)).any() for t in expected)  # it was a compressed cache
    assert capsys.readouterr().out == answers[0]


def test_the_evaluation_on_its_page_is_printed(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from sparse_rl.cli.main import app

    page = (ROOT / "docs/evaluate.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^ +sparse-rl eval (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    done = CliRunner().invoke(app, ["eval", *commands[1].split()])
    assert done.exit_code == 0, done.exception
    printed = done.stdout
    shown = page[page.index("<!-- eval -->") : page.index("<!-- /eval -->")]
    digits = re.compile(r"[0-9.,]+ *")  # another machine may round, and so sample, differently
    assert digits.sub("#", printed).strip() == digits.sub("#", shown.split("```")[1]).strip()


def test_the_compressor_example_is_complete():
    definition, use = python_blocks("docs/add-a-compressor.md")
    names: dict = {}
    exec(compile(definition, "docs/add-a-compressor.md", "exec"), names)
    exec(compile(use, "docs/add-a-compressor.md", "exec"), names)
    assert COMPRESSORS["vnorm"] is names["VNorm"]
    for t in names["trajectories"]:
        assert (t.trace.evicted_at.long() < len(t.tokens)).any()
        assert not (t.trace.evicted_at.long() < len(t.tokens))[..., :4].any()  # sinks
        with torch.no_grad():
            gap = token_logprobs(names["model"], t.tokens, t.trace).cpu() - t.sampler_logprobs
        assert gap[t.num_prompt_tokens :].abs().max() < 1e-5


def test_the_compressor_page_describes_every_field_of_the_view():
    from dataclasses import fields

    page = (ROOT / "docs/add-a-compressor.md").read_text()
    for field in fields(sparse_rl.CacheView):
        assert f"`{field.name}`" in page, field.name


@pytest.mark.parametrize(
    "name, mark, start", [("cli", "plan", "--model"), ("cli", "fit", "--recipe"), ("scale", "pool", "--recipe")]
)
def test_the_plans_on_the_pages_are_printed(name, mark, start):
    from typer.testing import CliRunner

    from sparse_rl.cli.main import app

    page = (ROOT / f"docs/{name}.md").read_text()
    (command,) = re.findall(rf"^ +sparse-rl plan ({start} qwen.*)$", page, flags=re.MULTILINE)
    done = CliRunner().invoke(app, ["plan", *command.split()])
    assert done.exit_code == 0, done.exception
    shown = page[page.index(f"<!-- {mark} -->") : page.index(f"<!-- /{mark} -->")].split("```")[1]
    assert [line.rstrip() for line in done.stdout.strip().splitlines()] == shown.strip().splitlines()


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / path).read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if not target.startswith("http"):
            there = ROOT / path if not target else (ROOT / path).parent / target
            assert there.exists(), target
            assert not anchor or anchor in headings(there), (target, anchor)


@pytest.mark.parametrize("path", PAGES)
def test_tests_and_benchmarks_that_a_page_names_exist(path):
    for named in re.findall(r"\b(?:tests|benchmarks)/[\w/-]+\.py\b", (ROOT / path).read_text()):
        assert (ROOT / named).is_file(), named


@pytest.mark.parametrize("path", PAGES)
def test_lines_of_prose_are_not_too_long(path):
    """At most 120 characters, but for tables, pictures and what a command prints."""
    text = re.sub(r"```.*?```", "", (ROOT / path).read_text(), flags=re.DOTALL)
    for line in text.splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![")), line


def test_the_readme_is_one_page_from_which_everything_is_near():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    for target in ("sparse_rl/train/loop.py", "sparse_rl/compressors/rkv.py"):  # the algorithm box; R-KV's score
        assert f"]({target})" in text
    for target in ("docs/tasks.md#add-your-own-task", "docs/metrics.md#gap"):
        assert f"]({target})" in text


def test_the_page_of_compressors_lists_every_one():
    text = (ROOT / "docs/compressors.md").read_text()
    for name in BY_NAME:
        assert f"| `{name}` |" in text


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    for name in sparse_rl.__all__:
        assert re.search(rf"[.]{name}\b", page), name


def test_public_names_exist():
    for name in sparse_rl.__all__:
        assert getattr(sparse_rl, name) is not None
    with pytest.raises(AttributeError):
        sparse_rl.nonsense  # noqa: B018


def test_the_pages_list_every_key_and_preset():
    from sparse_rl.config import table_of_keys
    from sparse_rl.learn.method import METHODS
    from sparse_rl.learn.objective import RELATIVES, settings_of

    page = (ROOT / "docs/keys.md").read_text()
    table = page[page.index("<!-- keys -->") : page.index("<!-- /keys -->")].splitlines()[3:]
    expected = [
        "| `{}` | `{}` | {} |".format(key, default, text.replace("|", "\\|")) for key, default, text in table_of_keys()
    ]
    assert table == expected
    page = (ROOT / "docs/methods.md").read_text()
    for preset in METHODS:
        assert f"`{preset}`" in page
    for relative in RELATIVES:
        assert f"| `{settings_of(relative)}` |" in page


def test_the_memory_plans_on_the_page_are_those_of_the_recipes():
    from sparse_rl.config import load_recipe
    from sparse_rl.planning.memory import size
    from sparse_rl.train.run import plan_run

    page = (ROOT / "docs/train.md").read_text()
    recipes = [(path, 1024) for path in sorted((ROOT / "recipes").glob("*-simplerl.yaml"))]
    small = [(path, 311) for path in sorted((ROOT / "recipes").glob("*-24gb.yaml"))]
    assert (len(recipes), len(small)) == (4, 3)
    for path, prompt_tokens in recipes + small:
        plan = plan_run(load_recipe(path), prompt_tokens)
        assert plan.fits(24 * 2**30) or (path, prompt_tokens) in recipes
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{path.stem}` |"))
        assert line.endswith(f"| {size(plan.update_bytes)} | **{size(plan.total_bytes)}** |")
        assert size(plan.optimizer_bytes) in line
