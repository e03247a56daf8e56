"""int8 products are exact by each method, for shapes that are small, odd, long, strided and degenerate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.cpu import products

SIZES = (1, 2, 3, 15, 16, 17, 33, 64, 65)


@pytest.fixture(params=list(products.METHODS))
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    before = products.method()
    products.use(request.param)
    yield request.param
    products.use(before)


def codes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)


def check(a: np.ndarray, b: np.ndarray) -> None:
    expected = a.astype(np.int64) @ b.astype(np.int64)
    assert np.array_equal(products.multiply(a, b), expected)
    out = np.full(expected.shape, -1, np.int32)
    assert products.multiply(a, b, out) is out
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("m", SIZES)
def test_small_and_odd_shapes(method: str, m: int) -> None:
    for k in SIZES:
        for n in SIZES:
            check(codes(1, m, k), codes(2, k, n))


def test_views_and_strides_of_dimensions_of_length_one(method: str) -> None:
    """NumPy gives a transposed column the strides (1, 1), with which _int_mm reads outside the array."""
    for k, n in ((1, 65), (65, 1), (1, 1), (64, 33)):
        check(codes(1, 7, k), codes(2, n, k).T)
        check(codes(1, k, 7).T, codes(2, k, n))
        check(codes(1, 9, k)[2:8], codes(2, k, 2 * n)[:, ::2])
    check(codes(1, 65, 1).T, codes(2, 65, 1))


def test_arrays_that_may_not_be_written_are_read_without_a_warning(
    method: str, recwarn: pytest.WarningsRecorder
) -> None:
    a, b = codes(1, 5, 6), codes(2, 6, 7)
    a.flags.writeable, b.flags.writeable = False, False
    check(a, b)
    assert not recwarn.list


@pytest.mark.parametrize("terms", [1023, 1024, 1025, 4096, 66_052, products.MAX_TERMS])
def test_long_contractions_at_the_extremes(method: str, terms: int) -> None:
    for x, y in ((127, 127), (-127, 127), (-127, -127), (-128, 127), (-128, -127)):
        if terms * abs(x * y) < 2**31:
            check(np.full((3, terms), x, np.int8), np.full((terms, 5), y, np.int8))


def test_shapes_that_do_not_fit_are_refused() -> None:
    a, b = codes(1, 3, 4), codes(2, 4, 5)
    for left, right, out in (
        (a, b.T, None),
        (a, b, np.empty((3, 4), np.int32)),
        (a, b, np.empty((5, 3), np.int32).T),
        (np.zeros((1, products.MAX_TERMS + 1), np.int8), np.zeros((products.MAX_TERMS + 1, 1), np.int8), None),
    ):
        with pytest.raises(ValueError, match="int8 product"):
            products.multiply(left, right, out)


def test_the_probe_refuses_methods_that_saturate_or_round() -> None:
    def saturates(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """As AVX2's vpmaddubsw: a + 128 is unsigned, and pairs of products are added in 16 bits."""
        terms = (a.astype(np.int32) + 128)[:, :, None] * b.astype(np.int32)[None]
        padded = np.pad(terms, ((0, 0), (0, terms.shape[1] % 2), (0, 0)))
        pairs = np.clip(padded[:, 0::2] + padded[:, 1::2], -(2**15), 2**15 - 1)
        out[...] = pairs.sum(axis=1) - 128 * b.sum(axis=0, dtype=np.int32)

    def rounds(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[...] = a.astype(np.float32) @ b.astype(np.float32)

    assert not products.exact(saturates)
    assert not products.exact(rounds)
    assert all(products.exact(candidate) for candidate in (products.METHODS["float32"], products.fastest()))


def test_the_faster_of_exact_methods_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2 alone oneDNN's int8 product is exact, and some thirty times slower than float32's."""

    def slow(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        time.sleep(0.01)
        products.METHODS["float32"](a, b, out)

    monkeypatch.setattr(products, "METHODS", {"slow": slow, **products.METHODS})
    assert products.exact(slow)
    assert products.fastest() is not slow


def test_scratch_is_reused_within_a_thread_and_never_between_threads() -> None:
    first = products.scratch("test", (4, 5), np.int32)
    assert np.shares_memory(first, products.scratch("test", (2, 3), np.int32))
    assert not np.shares_memory(first, products.scratch("test", (2, 3), np.float32))
    found = []
    thread = threading.Thread(target=lambda: found.append(products.scratch("test", (4, 5), np.int32)))
    thread.start()
    thread.join()
    assert not np.shares_memory(first, found[0])
