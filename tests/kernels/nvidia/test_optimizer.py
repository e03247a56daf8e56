"""Fixed sums, gradient norms and AdamW as Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from kernels.interface import AdamScalars
from kernels.nvidia import optimizer
from kernels.reference import new_flag
from tests.kernels.nvidia.rows import F32, KINDS, same, values

SHAPES = ((1, 1), (129, 17), (3, 2048), (2, 5632), (2, 40_000))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def whole(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """int64 of every size."""
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**63), 2**63 - 1, shape) >> rng.integers(0, 64, shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fixed_sums(shape: tuple[int, int], kind: str) -> None:
    same(optimizer.fixed_sum, reference.fixed_sum, values(1, shape, kind), new_flag())


@pytest.mark.parametrize("width", [2, 40_000])
@pytest.mark.parametrize("last", [2.0**127 - 2.0**104, 2.0**127 - 2.0**103])
def test_sums_within_and_beyond_float32(width: int, last: float) -> None:
    x = np.zeros((3, width), F32)
    x[:, 0], x[:, -1] = (2.0**127, -(2.0**127), 1), (last, -last, 2.0**-64)
    same(optimizer.fixed_sum, reference.fixed_sum, x, new_flag())


@pytest.mark.parametrize("shape", [*SHAPES, (17,), (2048,), (40_000,)], ids=str)
@pytest.mark.parametrize("mean", [2.0**-45, 2.0**-24 / 3, 2.0**20])
def test_squares(shape: tuple[int, ...], mean: float) -> None:
    same(optimizer.square_rows, reference.square_rows, whole(2, shape), F32(mean))
    same(optimizer.square_rows, reference.square_rows, values(2, shape, "plain"), F32(mean))  # an ordered reduction's


@pytest.mark.parametrize("shape", [(1,), (17,), (129, 33)], ids=str)
@pytest.mark.parametrize("clip", [1.0, 2.0**-44])
def test_adamw(shape: tuple[int, ...], clip: float) -> None:
    scalars = AdamScalars(*map(F32, (2.0**-30, clip, 3e-3, 0.9997, 0.9, 0.1, 0.95, 0.05, 5.26, 10.3, 1e-8)))
    for kind in ("plain", "wild", "tiny"):
        p, m, v = (values(seed, shape, kind) for seed in (3, 4, 5))
        for sums in (whole(6, shape), values(6, shape, "plain") * F32(2.0**30)):
            same(optimizer.adamw, reference.adamw, p, m, np.abs(v), sums, scalars)
