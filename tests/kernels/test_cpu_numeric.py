"""The compiled numbers equal the reference's on random bits, edges, ties; types that would round twice are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from kernels.cpu import initial, numeric, quantise
from kernels.reference import constants, elementary, numbers
from kernels.reference import quantise as quantisers

RANDOM = np.random.default_rng(0)
EDGES = np.float32([0, 1, 127, 32, 32.5, 126.5, 2**-64, 2**-100, 2**-126, 1e-45, 3.4e38, np.inf, np.nan])
FLOATS = np.concatenate(
    [
        *(np.nextafter(sign * EDGES, np.float32(way)) for sign in (1, -1) for way in (-np.inf, np.inf)),
        EDGES,
        -EDGES,
        RANDOM.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32),
        (RANDOM.standard_normal(300_000) * 20).astype(np.float32),
    ]
)


def over(function: Any, x: np.ndarray, dtype: type) -> np.ndarray:
    """A compiled function over a whole array."""

    @njit
    def loop(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    out = np.empty(x.size, dtype)
    loop(x, out)
    return out


def test_constants_are_the_references() -> None:
    for name in ("EXP2", "LOG2", "NORMAL", "LOG2_E", "LN_2", "ROOT_HALF_BITS"):
        assert getattr(numeric, name) == getattr(constants, name), name
    assert quantise.LSQ_STEP == quantisers.LSQ_STEP


@pytest.mark.parametrize(
    ("compiled", "reference", "dtype"),
    [
        (numeric.exp2, elementary.exp2, np.float32),
        (numeric.sigmoid, elementary.sigmoid, np.float32),
        (numeric.bf16, numbers.bf16, np.uint16),
    ],
)
def test_functions_of_any_float(compiled: Any, reference: Callable[[np.ndarray], np.ndarray], dtype: type) -> None:
    with np.errstate(all="ignore"):
        expected = reference(FLOATS)
    assert over(compiled, FLOATS, dtype).tobytes() == expected.tobytes()


def test_log2_of_positive_normal_numbers() -> None:
    x = np.abs(FLOATS)
    x = x[np.isfinite(x) & (x >= 2.0**-126)]
    assert over(numeric.log2, x, np.float32).tobytes() == elementary.log2(x).tobytes()


def test_normal_quantile() -> None:
    words = np.concatenate([np.uint32([0, 255, 256, 2**31 - 1, 2**31, 2**32 - 1]), FLOATS.view(np.uint32)])
    assert over(initial._normal_cut, words, np.float32).tobytes() == elementary.normal_cut(words).tobytes()


def test_bf16_back_to_float_is_exact() -> None:
    x = np.arange(2**16).astype(np.uint16)
    assert over(numeric.f32_of_bf16, x, np.float32).tobytes() == numbers.f32(x).tobytes()


def test_integers_round_once() -> None:
    """2⁶² + 2³⁸ + 1 lies just above a tie: through float64 it becomes the tie, and the tie goes down."""
    ties = np.array([2**62 + 2**38 + 1, 2**62 + 2**38, 2**62 + 2**38 - 1, 2**24 + 1, 2**63 - 1], np.int64)
    x = np.concatenate([ties, -ties, RANDOM.integers(-(2**62), 2**62, 100_000)])
    assert over(numeric.f32_of_i64, x, np.float32).tobytes() == x.astype(np.float32).tobytes()
    assert np.any(x.astype(np.float32) != x.astype(np.float64).astype(np.float32))
    small = (x >> 32).astype(np.int32)
    assert over(numeric.f32_of_i32, small, np.float32).tobytes() == small.astype(np.float32).tobytes()


def test_order_keys_sort_as_the_values_and_come_back() -> None:
    x = np.sort(FLOATS[np.isfinite(FLOATS)])
    keys = over(numeric.order_key, x, np.int32)
    assert np.all(np.diff(keys.astype(np.int64))[np.diff(x) > 0] > 0)
    assert over(numeric.key_bits, keys, np.int32).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (numeric.rint, np.float64(1)),
        (numeric.bits, np.float64(1)),
        (numeric.f32_of_i32, np.int64(1)),
        (numeric.f32_of_i64, np.float32(1)),
        (numeric.bf16, np.float64(1)),
        (numeric.exp2, np.float64(1)),
    ],
)
def test_another_type_is_refused(function: Any, argument: Any) -> None:
    @njit
    def call(x):
        return function(x)

    with pytest.raises(TypingError, match="may round differently"):
        call.compile((numba.typeof(argument),))
