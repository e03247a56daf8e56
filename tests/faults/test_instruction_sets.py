"""The same bits whatever instructions a processor has, and whatever a library does with its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import reference
from kernels.cpu import products
from kernels.generic import products as generic_products
from model.state import initial_state
from model.step import StepRecord, step
from tests.faults import layer
from tests.kernels import float_guard
from tests.model import tiny

ROOT = Path(__file__).resolve().parents[2]
EXACT = 2**24  # whole numbers up to here are exact in float32, and so is every sum of them that stays below

# Lanes: what the processor must have, LLVM's name and features for it, oneDNN's and OpenBLAS's limits.
WIDTHS = {
    4: ("sse4_1", "nehalem", "+sse2", "SSE41", "Nehalem"),
    8: ("avx2", "haswell", "+sse2", "AVX2", "Haswell"),
    16: ("avx512bw", "skylake-avx512", "-prefer-256-bit", "AVX512_CORE", "SkylakeX"),
}


def run_layer(**environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.faults.layer", "cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_lane_widths_change_no_bit(width: int) -> None:
    """A deterministic mode gave other results on AVX-512: it promises repeatability on one machine, not across sets."""
    needs, cpu, features, onednn, openblas = WIDTHS[width]
    if needs not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split():
        pytest.skip(f"this processor has no {needs}")
    names = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    found = run_layer(**names, ONEDNN_MAX_CPU_ISA=onednn, OPENBLAS_CORETYPE=openblas)
    assert found == {"digest": layer.digests(reference), "lanes": width}


@pytest.fixture(params=["cpu onednn", "cpu float32", "generic:cpu int_mm", "generic:cpu float32"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend made to use one of its ways to int8 products."""
    name, _, method = request.param.partition(" ")
    before = products.method()
    if name == "cpu":
        if not products.exact(products.METHODS[method]):
            pytest.skip(f"{method} is not exact on this machine, so it is never used")
        products.use(method)
    monkeypatch.setattr(generic_products, "METHODS", {method: generic_products.METHODS.get(method)})
    generic_products.method.cache_clear()
    yield name
    products.use(before)
    generic_products.method.cache_clear()


class InexactProduct(AssertionError):
    """A library was about to multiply matrices of floats whose sums may round."""


def guarded(matmul: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """np.matmul that raises unless both operands are whole numbers, so small that no partial sum can round."""

    def product(a: np.ndarray, b: np.ndarray, **options: Any) -> Any:
        if "f" in a.dtype.kind + b.dtype.kind:
            whole = all(np.array_equal(x, np.rint(x)) for x in (a, b))
            if not whole or a.shape[1] * float(np.abs(a).max()) * float(np.abs(b).max()) > EXACT:
                raise InexactProduct(f"{a.dtype}{a.shape} times {b.dtype}{b.shape}")
            calls.append(1)
        return matmul(a, b, **options)

    return product


def first_step(name: str) -> tuple[StepRecord, int]:
    """A step's record, and how many products of floats NumPy was asked for; all of them, and torch's, exact ones."""
    run, b, calls = tiny.spec(), kernels.backend(name), list[int]()
    with pytest.MonkeyPatch.context() as patch, float_guard.forbidden():
        patch.setattr(np, "matmul", guarded(np.matmul, calls))
        return step(run, b, initial_state(run, b), tiny.windows(run, 0, 2)), len(calls)


def test_no_float_product_of_a_library_reaches_a_digest(backend: str) -> None:
    """The variable that should limit a library to AVX2 did not: its BLAS chooses by itself."""
    record, calls = first_step(backend)
    run = tiny.spec()
    expected = step(run, reference, initial_state(run, reference), tiny.windows(run, 0, 2))
    assert (record.state, record.gradient, record.loss) == (expected.state, expected.gradient, expected.loss)
    assert bool(calls) == (backend == "cpu" and products.method() == "float32")


@pytest.mark.parametrize(("left", "right"), [(0.5, 1), (1, 0.25), (300, 300), (127, np.nan), (np.inf, 1)], ids=str)
def test_the_guard_refuses_products_that_may_round(left: float, right: float) -> None:
    a, b = np.full((2, 600), left, np.float32), np.full((600, 3), right, np.float32)
    with pytest.raises(InexactProduct):
        guarded(np.matmul, [])(a, b)
    assert guarded(np.matmul, [])(np.sign(a[:, :5]) * 0 + 127, np.ones((5, 3), np.float32))[0, 0] == 635
