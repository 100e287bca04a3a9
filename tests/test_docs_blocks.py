"""Every block of the documents runs, or says what it needs.

A block is fenced or indented. Before a block that cannot run here stands `<!-- needs: a GPU -->` or the like, before
one that only shows a form `<!-- synopsis -->`. All others are executed: commands in the order of their page, in a
folder that has the page's files, with training cut to a step; recipes are made; Python runs. Pages of results are
records.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from sparse_rl.config import make_recipe
from tests.helpers.runs import run

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PROGRAMS = ("sparse-rl", "python", "python3", "pip", "uv", "make", "torchrun", "accelerate", "ray", "tensorboard")
ELSEWHERE = {  # Python blocks that tests/test_docs.py executes with more assertions, and commands that others test
    "README.md": "make demo, make test: every push; the example of a replay: tests/test_docs.py",
    "docs/python.md": "tests/test_docs.py",
    "docs/add-a-compressor.md": "tests/test_docs.py",
    "docs/evaluate.md": "tests/test_docs.py",
    "docs/reward-models.md": "tests/train/test_reward_model.py",
    "docs/trl.md": "examples/trl_grpo.py: tests/integrations/test_trl_adapter.py",
}
README_NEEDS = ("make ", "sparse-rl data gsm8k", "sparse-rl train qwen2.5-1.5b-gsm8k-24gb")  # minutes; GPU, network
STEP = "--rollout.prompts 2 --rollout.group_size 2 --rollout.max_new_tokens 24 --learn.minibatches 1 --eval.every 0"
SHORT = {  # what makes a command of the documents take seconds
    "train": f"--run.steps 1 {STEP} --run.diagnose 1 --run.samples 1",
    "warmup": "--warmup.steps 2 --warmup.batch 4 --eval.prompts 2",
    "eval": "--limit 2 --max-new-tokens 24",
    "report": "",
    "export": "",
    "train-compressor": "--rounds 1 --trajectories 4 --steps 2",
    "allocate": "--trajectories 4",
    "plan": "",
    "list": "",
}


@dataclass(frozen=True)
class Block:
    language: str  # of a fence; "" for none, "indented" without one
    text: str
    mark: str  # the comment before it

    @property
    def runs(self) -> bool:
        return not self.mark.startswith(("needs:", "synopsis", "demo"))  # what the demo prints is tested elsewhere

    def commands(self) -> list[str]:
        """Its commands, without continuation lines, comments and what they print."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [
            re.sub(r"\s+# .*", "", line).strip() for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS
        ]


def blocks(page: str) -> list[Block]:
    found, lines, i, mark = [], (ROOT / page).read_text().splitlines(), 0, ""
    while i < len(lines):
        line, begin = lines[i], i
        if line.startswith("```"):
            i = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            found.append(Block(line[3:].strip(), "\n".join(lines[begin + 1 : i]), mark))
        elif line.startswith("    ") and not lines[i - 1].strip() and not line.lstrip().startswith(("- ", "* ")):
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1].strip()):
                i += 1
            text = "\n".join(text[4:] for text in lines[begin : i + 1]).strip()
            found.append(Block("indented", text, mark))
        comment = re.fullmatch(r"<!-- (.*) -->", line)
        mark = comment[1] if comment else mark if not line.strip() else ""
        i += 1
    return found


def file_of(block: Block) -> str | None:
    """The name of the file that a block shows, in its first line."""
    named = re.match(r"# ([\w-]+\.(py|yaml))\n", block.text)
    return named[1] if named else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_or_say_what_they_need(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if name := file_of(block):
            Path(name).write_text(block.text.split("\n\nsparse-rl ")[0])
        for command in block.commands() if block.runs else []:
            if (page == "README.md" and command.startswith(README_NEEDS)) or "--live" in command:  # a server
                continue
            program, *arguments = shlex.split(command)
            if program != "sparse-rl" or (arguments[0], page) == ("eval", "docs/evaluate.md"):
                assert page in ELSEWHERE, f"{page}: {command}: write <!-- needs: ... --> before it, or test it"
                continue
            verb = arguments[0]
            assert verb in SHORT, f"{page}: {command}"
            for folder in arguments if verb in ("report", "eval", "export") else []:  # runs that readers have
                if folder.startswith("runs/") and not Path(folder).exists():
                    assert run("train", "tiny-sums", "--out", folder, *SHORT["train"].split()).returncode == 0
            more = ["--run.steps", "2"] if "--resume" in arguments else SHORT[verb].split()
            done = run(*arguments, *more)
            assert done.returncode == 0, f"{page}: {command}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_recipes_are_recipes(page):
    for block in blocks(page):
        for part in re.split(r"\n\n|\n(?=rollout:)", block.text):
            if re.match(r"(# \w+\.yaml\n)?(model|task|rollout|learn|student): *[{\n]", part):
                make_recipe({"model": {"name": "tiny"}, "task": {"name": "sums"}, **yaml.safe_load(part)})


@pytest.mark.parametrize("page", PAGES)
def test_python_runs_or_says_what_it_needs(page):
    for block in blocks(page):
        python = block.language == "python" or re.match(r"(from|import|def|class|# \w+\.py\n)", block.text)
        if python and block.runs and page not in ELSEWHERE:
            exec(compile(block.text, page, "exec"), {})


def test_every_extra_is_explained():
    import tomllib

    page = (ROOT / "docs/install.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] and all(
        f"| `{extra}` |" in page for extra in extras
    )
