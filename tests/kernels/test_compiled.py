"""Every kernel compiles ahead of time for the GPUs that we name, within their shared memory; and tiles follow it.

Only the H200 (sm_90) has run them. Compiling needs no GPU, but a process of its own: here Triton interprets.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from sparse_rl.kernels.decode import stages_for
from sparse_rl.kernels.evict import observed_tiles

ROOT = Path(__file__).parent.parent.parent
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # of a block; CUDA programming guide


def compiled(folder: Path, *arguments: object) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.compiled_kernels", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """The kernels that are launched: jitted functions whose name is followed by a grid."""
    modules = [ast.parse(path.read_text()) for path in (ROOT / "sparse_rl" / "kernels").glob("*.py")]
    launched = (n.value.id for m in modules for n in ast.walk(m) if isinstance(n, ast.Subscript)
                and isinstance(n.value, ast.Name) and n.value.id.startswith("_"))  # fmt: skip
    jitted = {f.name for m in modules for f in ast.walk(m) if isinstance(f, ast.FunctionDef) and f.decorator_list}
    return set(launched) & jitted


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles_within_the_shared_memory_of_a_gpu(tmp_path, capability, dtype):
    found = compiled(tmp_path, capability, "--dtypes", dtype, "--dims", "64,128,256")
    assert {line["kernel"] for line in found} == kernels()
    for line in found:
        assert line["shared"] <= LIMITS[capability], line
        assert capability < 90 or not line["fused"], line  # older ones multiply bf16 by adding zero


def test_ragged_micro_batches_need_no_variants_of_their_own(tmp_path):
    """A kernel that is compiled for every kind of length is compiled in many steps. Twice: with and without a sum, or
    forward and backward.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/first_step.py", "--compile", "90", "--kernels", "layers,head"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| _")]
    assert {name.strip(): int(variants) for name, variants in rows} == {
        "_add_norm_forward": 2,
        "_add_norm_backward": 2,
        "_rotate": 2,
        "_gate_forward": 1,
        "_gate_backward": 1,
        "_token_statistics": 1,
        "_logit_gradients": 1,
    }


def test_tiles_are_what_the_shared_memory_of_a_gpu_holds():
    """Measured with the kernels themselves: the test above."""
    large, small = LIMITS[90], LIMITS[86]
    half, full = torch.bfloat16, torch.float32
    assert observed_tiles(64, 256, half, large) == {"BLOCK": 128, "num_stages": 3}  # as it was measured
    assert observed_tiles(64, 256, half, small) == {"BLOCK": 64, "num_stages": 3}
    assert observed_tiles(8, 128, half, small) == {"BLOCK": 128, "num_stages": 3}
    assert observed_tiles(64, 256, full, large) == {"BLOCK": 32, "num_stages": 3}
    assert observed_tiles(64, 256, full, small) == {"BLOCK": 32, "num_stages": 2}
    assert stages_for(32, 16, 4 * 256, large) == 3 > stages_for(32, 16, 4 * 256, small) == 2
    assert stages_for(32, 16, 2 * 128, small) == 3 and stages_for(32, 16, 2048, large) == 1
