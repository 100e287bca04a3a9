"""A task of functions, in a file."""

import pytest

from tests.helpers.task_files import FUNCTIONS, write


@pytest.fixture
def functions(tmp_path):
    return write(tmp_path / "doubling.py", FUNCTIONS)
