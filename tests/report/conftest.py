"""A real run to report on."""

import pytest

from sparse_rl.config import load_recipe
from sparse_rl.train.run import train


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "it's mine"
    changes = {
        "steps": "4",
        "rollout.prompts": "4",
        "eval.every": "2",
        "eval.prompts": "8",
        "run.samples": "3",
        "checkpoint_every": "4",
    }
    train(load_recipe("tiny-sums", list(changes.items())), folder, show=False)
    return folder
