"""The compiled CPU kernels hold no double, no contraction, no sum of floats over an index; the check sees each."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from kernels import conformance, cpu
from kernels.cpu.fingerprint import fingerprint
from kernels.interface import AdamScalars
from tests.kernels import compiled

MODULES = [importlib.import_module(f"kernels.cpu.{info.name}") for info in pkgutil.iter_modules(cpu.__path__)]
KERNELS = dict(kernel for module in MODULES for kernel in compiled.kernels(module))
F32 = np.float32
HALF, TENTH = F32(0.5), 0.1


@pytest.fixture(scope="module", autouse=True)
def called() -> None:
    """The conformance cases call every kernel, which fixes the types it is compiled for; ordered gradients are f32, and
    fingerprints are no part of a step."""
    with np.errstate(all="ignore"):
        list(conformance.run(cpu))
        p, m, v, gradient = np.ones((4, 2, 3), F32)
        cpu.square_rows(gradient, F32(1))
        cpu.adamw(p, m, v, gradient, AdamScalars(*(F32(0.5),) * 11))
        fingerprint(np.ones(3, np.int64), 1, "beside the contract")


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str) -> None:
    assert KERNELS[name].signatures, f"{name} is called by no conformance case, so nothing checks it: is it needed?"
    assert compiled.problems(KERNELS[name]) == []


def test_kernels_of_one_thread_and_of_many_are_looked_at() -> None:
    assert {"kernels.cpu.linear.add_gradient", "kernels.cpu.layers._norm_rows"} <= KERNELS.keys()


def total(x):
    result = F32(0)
    for i in range(x.size):
        result += x[i]
    return result


def total_of_products(x):
    result = HALF
    for i in range(x.size):
        result = result * HALF + x[i]
    return result


def total_in_an_element(x):
    for i in range(1, x.size):
        x[0] += x[i]


def literal(x):
    for i in range(x.size):
        x[i] = x[i] * TENTH


def mixed(x):
    for i in range(x.size):
        x[i] = x[i] * np.int32(i)


def power(x):
    for i in range(x.size):
        x[i] = np.exp(x[i])


def product_and_sum(x):
    for i in range(x.size):
        x[i] = x[i] * HALF + HALF


@pytest.mark.parametrize(
    ("function", "fastmath", "problem"),
    [
        (total, False, "a sum of floats over an index"),
        (total, True, "a relaxed float operation"),
        (total_of_products, False, "a sum of floats over an index"),
        (total_in_an_element, False, "a sum of floats over an index"),
        (literal, False, "double precision"),
        (mixed, False, "double precision"),
        (power, False, "a call into a mathematical library"),
        (product_and_sum, True, "a relaxed float operation"),
        (product_and_sum, True, "a contracted instruction"),
        (product_and_sum, False, None),
    ],
)
def test_the_check_sees(function: Callable[[Any], Any], fastmath: bool, problem: str | None) -> None:
    dispatcher = njit(fastmath=fastmath, error_model="numpy")(function)
    dispatcher(np.ones(100, F32))
    found = {text.split(":")[0] for text in compiled.problems(dispatcher)}
    assert found == set() if problem is None else problem in found


def test_kernels_use_whole_vectors_also_where_the_compiler_prefers_halves() -> None:
    """On processors with AVX-512: compiled for one of Intel's, a kernel of one loop has 512-bit registers."""
    script = """
import kernels.cpu.numeric
from numba import config, float32, njit
config.CPU_NAME = "sapphirerapids"
def scale(x, y):
    for i in range(x.size):
        y[i] = x[i] * x[i]
array = float32[::1]
print("zmm" in next(iter(njit((array, array))(scale).inspect_asm().values())), config.CPU_FEATURES)
"""
    given = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, check=True)
    wide, _, features = done.stdout.strip().partition(" ")
    assert wide == str("+avx512f" in features)
