"""Run folders of strangers: nothing in them runs when they are resumed."""

import pickle
import shutil

import pytest
import torch

from tests.helpers.network import Command
from tests.helpers.runs import run, write_recipe


@pytest.fixture
def foreign(tmp_path):
    """A run folder with a checkpoint that says that its learner was divided."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-000001"
    (checkpoint / "shards").mkdir(parents=True)
    shutil.copy(write_recipe(tmp_path, eval={"every": 0}), folder / "recipe.yaml")
    optimizer = {"masters": [None], "exp_avg": [None], "exp_avg_sq": [None], "step": [torch.tensor(1.0)]}
    learner = {"optimizer": optimizer, "version": 1, "skipped": 0}
    state = {"step": 1, "torch_rng": torch.get_rng_state(), "shards": True, "learner": learner}
    torch.save(state, checkpoint / "training.pt")
    return checkpoint, tmp_path / "proof"


def test_shards_of_a_stranger_run_no_code(foreign):
    """torch's own format begins with a pickle, which torch loads without asking."""
    checkpoint, proof = foreign
    (checkpoint / "shards" / ".metadata").write_bytes(pickle.dumps(Command(proof)))
    done = run("train", checkpoint.parent.parent, "--resume")
    assert done.returncode == 1 and not proof.exists()
    assert "do one step with that version and --model.shard false" in done.stderr, done.stderr


def test_a_state_of_a_stranger_runs_no_code(foreign):
    checkpoint, proof = foreign
    torch.save({"step": 1, "learner": Command(proof)}, checkpoint / "training.pt")
    done = run("train", checkpoint.parent.parent, "--resume")
    assert done.returncode == 1 and not proof.exists() and "training.pt is damaged" in done.stderr, done.stderr


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_damaged_shards_are_one_sentence(foreign, content):
    checkpoint, _ = foreign
    if content is not None:
        (checkpoint / "shards" / "process-00000.safetensors").write_bytes(content)
    done = run("train", checkpoint.parent.parent, "--resume")
    assert done.returncode == 1 and "shards is damaged" in done.stderr, done.stderr
