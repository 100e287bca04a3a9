import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a download; do not wait for one

import pickle
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU the kernels run in Triton's interpreter. Triton reads this at its first import, and peft imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparse_rl import COMPRESSORS
from sparse_rl.learn.advantage import ESTIMATORS
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.method import METHODS
from sparse_rl.tasks import TASKS, verify
from tests.helpers.models import ARCHITECTURES, tiny

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# a shell's background jobs, and pytest's own workers, start with Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples every time, and none too slow: a failure is a defect. `--hypothesis-profile search` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def the_same_whatever_ran_before():
    """Tests draw the same numbers, and know the same names, whichever tests share their process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    registries = (COMPRESSORS, METHODS, PRESETS, ESTIMATORS, TASKS)
    known = [dict(registry) for registry in registries]
    yield
    for registry, before in zip(registries, known, strict=True):
        registry.clear()
        registry.update(before)


@pytest.fixture
def impatient(monkeypatch):
    """impatient(seconds, hangs): completions for which hangs(prompt, text) must be graded within so many seconds. The
    others keep the deadline of their task: a busy machine may take long for an honest one.
    """
    send = verify.Child.send

    def give_less(seconds, hangs):
        def sent(self, message, deadline):
            first, second, last = pickle.loads(message)
            greeting = isinstance(last, dict)  # name, options and limits of the task
            send(self, message, seconds if not greeting and hangs(first, second) else deadline)

        monkeypatch.setattr(verify.Child, "send", sent)

    return give_less


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return tiny(request.param)


@pytest.fixture
def llama():
    """Shared by all tests. Hooks that gradient checkpointing leaves behind would break later copies."""
    model = tiny("llama")
    yield model
    if getattr(model, "_require_grads_hooks", None) or hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
