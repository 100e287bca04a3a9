import pytest

from sparse_rl.train.run import train
from tests.helpers.runs import recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of an uninterrupted run of 6 steps. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(recipe(run={"steps": 6}), folder, show=False)
    return folder
