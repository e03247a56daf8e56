"""The compiled CPU kernels hold no double, no contraction, no sum of floats over an index; the check sees each."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from kernels import conformance, cpu
from tests.kernels import compiled

MODULES = [importlib.import_module(f"kernels.cpu.{info.name}") for info in pkgutil.iter_modules(cpu.__path__)]
KERNELS = dict(kernel for module in MODULES for kernel in compiled.kernels(module))
F32 = np.float32
HALF, TENTH = F32(0.5), 0.1


@pytest.fixture(scope="module", autouse=True)
def called() -> None:
    """The conformance cases call every kernel, which fixes the types it is compiled for."""
    with np.errstate(all="ignore"):
        list(conformance.run(cpu))


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
