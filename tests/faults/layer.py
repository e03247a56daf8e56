"""One linear layer of 100 × 100, forward and backward, in a process of its own: prints {"digest", "lanes"} as JSON.

    python -m tests.faults.layer BACKEND

lanes: float32 values in the widest register that the compiler used for a kernel of the layer; 0 for other backends.
"""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np

import kernels
from kernels.digest import tensor_digest
from kernels.interface import GradientSlices, Part
from kernels.reference.numbers import bf16

SIZE = 100
LANES = {"z": 16, "y": 8, "x": 4}


def digests(b: ModuleType) -> list[str]:
    """Digests of output, input gradient and weight gradient, for one and for two slices."""
    random = np.random.default_rng(100)
    x, dy, residual = (b.to_device(bf16(random.standard_normal((SIZE, SIZE)).astype(np.float32))) for _ in range(3))
    flag, found = b.new_flag(), []
    for slices, rule in ((1, "max"), (2, "lsq")):
        rows = b.quantise_rows(x, slices, flag)
        weight = b.quantise_weight(b.to_device(random.standard_normal((SIZE, SIZE)).astype(np.float32)), rule, flag)
        sums = [b.new_sums((SIZE, SIZE)) for _ in range(2)]
        parts = tuple(Part(d, weight, own) for d, own in zip((dy, residual), sums))  # two, whose floats are added
        dx = b.linear_backward(rows, parts, GradientSlices(slices, slices), flag)
        outputs = (b.project(rows, weight), b.project_add(rows, weight, residual), dx, *sums, flag)
        found += [tensor_digest(str(number), b.to_host(y)) for number, y in enumerate(outputs)]
    return found


def lanes() -> int:
    """Of the assembly of one kernel, compiled anew for the processor that this process is told it has."""
    from numba import njit

    from kernels.cpu import linear

    kernel: Any = linear._add_values
    fresh = njit(error_model="numpy")(kernel.py_func)
    fresh.compile(kernel.signatures[0])
    (assembly,) = fresh.inspect_asm().values()
    used = set(re.findall(r"%([xyz])mm\d", assembly))
    return max(LANES[register] for register in used)


if __name__ == "__main__":
    backend = kernels.backend(sys.argv[1])
    result = digests(backend)
    print(json.dumps({"digest": result, "lanes": lanes() if sys.argv[1] == "cpu" else 0}))
