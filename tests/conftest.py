import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a download; do not wait for one

import signal

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter. Triton reads this at its first import, and peft imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparse_rl import COMPRESSORS
from tests.helpers.models import ARCHITECTURES, tiny

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# a shell's background jobs, and pytest's own workers, start with Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_test_leaves_a_compressor_behind():
    known = dict(COMPRESSORS)
    yield
    COMPRESSORS.clear()
    COMPRESSORS.update(known)


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return tiny(request.param)


@pytest.fixture
def llama():
    return tiny("llama")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
