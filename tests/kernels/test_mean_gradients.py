"""Norms and AdamW from the f32 mean of an ordered reduction: the same bytes on every backend."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import reference
from kernels.interface import AdamScalars

F32 = np.float32
MEAN = F32(2.0**-24 / 96)
SCALARS = AdamScalars(MEAN, *map(F32, (0.7, 3e-4, 0.99997, 0.9, 0.1, 0.95, 0.05, 5.26, 10.3, 1e-8)))
SHAPES = [(1,), (129,), (64, 129), (3, 5, 7)]
BACKENDS = (*kernels.HOSTS, "generic:cpu")


def gradient(shape: tuple[int, ...]) -> np.ndarray:
    """f32 of every size from 2⁻²⁰ to 2⁶⁰, most of them no whole numbers."""
    random = np.random.default_rng(1)
    return (random.uniform(-1, 1, shape) * 2.0 ** random.integers(-20, 60, shape)).astype(F32)


def state(shape: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(2)
    p, m, v = (random.normal(0, 0.02, shape).astype(F32) for _ in range(3))
    return [p, m, np.square(v)]


def updated(backend: ModuleType, shape: tuple[int, ...], sums: np.ndarray) -> list[bytes]:
    placed = [backend.to_device(array) for array in state(shape)]
    backend.adamw(*placed, backend.to_device(sums), SCALARS)
    return [backend.to_host(array).tobytes() for array in placed]


def squares(backend: ModuleType, sums: np.ndarray) -> bytes:
    found: Any = backend.to_host(backend.square_rows(backend.to_device(sums), MEAN))
    return bytes(found.tobytes())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_takes_the_mean_as_it_is(name: str, shape: tuple[int, ...]) -> None:
    backend, mean = kernels.backend(name), gradient(shape)
    assert updated(backend, shape, mean) == updated(reference, shape, mean)
    assert squares(backend, mean) == squares(reference, mean)


@pytest.mark.parametrize("work", [lambda b, sums: updated(b, (64, 129), sums), squares], ids=["adamw", "squares"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_sum_rounded_before_is_a_sum_rounded_inside(name: str, work: Callable[[ModuleType, np.ndarray], Any]) -> None:
    random = np.random.default_rng(3)
    sums = random.integers(-(2**62), 2**62, (64, 129)) >> random.integers(0, 62, (64, 129))
    backend = kernels.backend(name)
    assert work(backend, sums) == work(backend, sums.astype(F32))
