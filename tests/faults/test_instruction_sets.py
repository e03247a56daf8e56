"""The same bits whatever instructions a processor has, and whatever a library does with its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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

# Lanes: what the processor must have, LLVM's name and features for it, the limits of oneDNN and of torch's loops.
WIDTHS = {
    4: ("sse4_1", "nehalem", "+sse2", "SSE41", "default"),
    8: ("avx2", "haswell", "+sse2", "AVX2", "avx2"),
    16: ("avx512bw", "skylake-avx512", "-prefer-256-bit", "AVX512_CORE", "avx512"),
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
    needs, cpu, features, onednn, loops = WIDTHS[width]
    if needs not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split():
        pytest.skip(f"this processor has no {needs}")
    names = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    found = run_layer(**names, ONEDNN_MAX_CPU_ISA=onednn, ATEN_CPU_CAPABILITY=loops)
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


def first_step(name: str) -> tuple[StepRecord, int]:
    """A step's record, and how many products of floats torch was asked for; no order of sums can change any of them."""
    run, b = tiny.spec(), kernels.backend(name)
    with float_guard.forbidden() as products_of_floats:
        record = step(run, b, initial_state(run, b), tiny.windows(run, 0, 2))
    return record, products_of_floats.total()


def test_no_float_product_of_a_library_reaches_a_digest(backend: str) -> None:
    """The variable that should limit a library to AVX2 did not: its BLAS chooses by itself."""
    record, calls = first_step(backend)
    run = tiny.spec()
    expected = step(run, reference, initial_state(run, reference), tiny.windows(run, 0, 2))
    assert (record.state, record.gradient, record.loss) == (expected.state, expected.gradient, expected.loss)
    method = products.method() if backend == "cpu" else generic_products.method(torch.device("cpu"))
    assert bool(calls) == (method == "float32")


@pytest.mark.parametrize(("left", "right"), [(0.5, 1), (1, 0.25), (300, 300), (127, np.nan), (np.inf, 1)], ids=str)
def test_the_guard_refuses_products_that_may_round(left: float, right: float) -> None:
    a, b = torch.full((2, 600), float(left)), torch.full((600, 3), float(right))
    with float_guard.forbidden() as products_of_floats:
        with pytest.raises(float_guard.FloatSum):
            torch.mm(a, b)
        assert torch.mm(torch.full((2, 5), 127.0), torch.ones(5, 3))[0, 0] == 635
    assert products_of_floats.total() == 1
