"""No digest changes where the processor flushes subnormals to zero, as some libraries make it do behind one's back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import numpy as np, torch
assert torch.set_flush_denormal(True)  # before Numba starts its threads, which inherit it
from numba import njit, prange

@njit(parallel=True)
def halve(x, out):
    for i in prange(x.size):
        out[i] = x[i] * np.float32(0.5)

out = np.ones(64, np.float32)
halve(np.full(64, 2.0**-126, np.float32), out)
assert not out.any(), "a thread keeps subnormals, so this test would test nothing"
from kernels import conformance, cpu, reference
with np.errstate(all="ignore"):
    print(conformance.self_test(cpu) + conformance.self_test(reference))
"""


@pytest.mark.slow
def test_flushing_subnormals_changes_no_vector() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
