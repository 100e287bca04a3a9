"""The tutorial runs from its first cell to its last; cut short here, whole in `make slow`."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs/tutorial.ipynb"


def executed(folder: Path) -> str:
    """Everything that its cells print."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def test_the_tutorial_runs_with_few_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TUTORIAL_STEPS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    printed = executed(tmp_path)
    assert "largest |gap|" in printed and "done; the model is in" in printed
    assert (tmp_path / "runs/tutorial.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_tutorial_teaches_the_model(tmp_path, monkeypatch):
    monkeypatch.delenv("TUTORIAL_STEPS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executed(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs/tutorial/metrics.jsonl").read_text().splitlines()]
    sparse = [line["eval/sparse/accuracy"] for line in lines if "eval/sparse/accuracy" in line]
    assert sparse[-1] > sparse[0] + 0.1  # 0.27 at the start


def test_the_tutorial_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
        else:
            for target in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
                assert (NOTEBOOK.parent / target).exists(), target
