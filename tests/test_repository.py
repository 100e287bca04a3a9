"""The files that other tools read: workflows, the citation, hooks, the lowest versions."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sparse_rl

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize(
    "schema, files", [("github-workflows", WORKFLOWS), ("citation-file-format", [ROOT / "CITATION.cff"])]
)
def test_files_follow_their_schema(schema, files):
    """The schemas that check-jsonschema brings with it: nothing is fetched."""
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_targets_that_the_makefile_has():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"^make (\w+)", step.get("run", ""), flags=re.MULTILINE):
                    assert target in targets, (path.name, target)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert citation["version"] == sparse_rl.__version__
    assert citation["repository-code"] == urls["Repository"]


def test_the_lowest_versions_are_those_that_the_package_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {}
    for requirement in project["dependencies"]:
        name, lowest = re.match(r"([\w-]+)(?:\[[^\]]*\])?>=([\d.]+)", requirement).groups()
        allowed[name] = lowest
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / ".github/lowest.txt").read_text(), flags=re.MULTILINE))
    assert pinned.keys() == allowed.keys()
    for name, version in pinned.items():
        assert re.sub(r"(\.0)+$", "", version) == re.sub(r"(\.0)+$", "", allowed[name]), name
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert f">={workflow['jobs']['test']['strategy']['matrix']['python'][0]}" == project["requires-python"]
