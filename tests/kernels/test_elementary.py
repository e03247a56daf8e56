"""exp2, log2, sigmoid and the normal quantile: their bits (exactness), and apart from them their errors (accuracy)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from kernels.reference import constants, elementary, philox
from model.host import as_fraction, f32
from tests.kernels.derive_constants import DERIVATIONS

Function = Callable[[np.ndarray], np.ndarray]


def spread(low: float, high: float, count: int = 2_000_001) -> np.ndarray:
    return np.linspace(low, high, count).astype(np.float32)


def random_floats(count: int) -> np.ndarray:
    """float32 of every kind: all exponents, both signs, subnormals, infinities and NaN."""
    special = np.array([0, 1, 0x7F800000, 0x7FC00000, 0x7F800001, 0x3F3504F3, 0x3F3504F2, 0x42000000], np.uint32)
    words = np.concatenate([philox.words(7, "test floats", 0, count), special, special | np.uint32(0x80000000)])
    return words.view(np.float32)


# Exactness: the order of operations is the definition.


def product_sum(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a·b rounded, then + c rounded, in exact fractions."""
    return f32(as_fraction(f32(as_fraction(a) * as_fraction(b))) + as_fraction(c))


def exact_horner(coefficients: tuple[np.float32, ...], x: np.float32) -> np.float32:
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = product_sum(value, x, coefficient)
    return value


def test_exp2_is_rounded_after_each_operation() -> None:
    for x in spread(-32, 20, 997):
        whole = round(Fraction(float(x)))  # Python rounds to even too
        mantissa = as_fraction(exact_horner(constants.EXP2, f32(as_fraction(x) - whole)))
        assert elementary.exp2(x.reshape(1))[0] == f32(mantissa * Fraction(2) ** whole)


def test_log2_is_rounded_after_each_operation() -> None:
    for x in np.exp2(np.linspace(-20, 60, 997)).astype(np.float32):
        exponent = 0
        root = as_fraction(np.int32(constants.ROOT_HALF_BITS).view(np.float32))
        while as_fraction(x) / Fraction(2) ** exponent >= 2 * root:
            exponent += 1
        while as_fraction(x) / Fraction(2) ** exponent < root:
            exponent -= 1
        t = f32(as_fraction(x) / Fraction(2) ** exponent - 1)
        assert elementary.log2(x.reshape(1))[0] == product_sum(t, exact_horner(constants.LOG2, t), f32(exponent))


def test_sigmoid_is_rounded_after_each_operation() -> None:
    for x in spread(-23, 23, 499):
        power = f32(-as_fraction(f32(abs(as_fraction(x)) * as_fraction(constants.LOG2_E))))
        e = elementary.exp2(power.reshape(1))[0]
        s = f32(1 / as_fraction(f32(1 + as_fraction(e))))
        expected = s if x >= 0 else f32(as_fraction(e) * as_fraction(s))
        assert elementary.sigmoid(x.reshape(1))[0] == expected


def test_normal_is_rounded_after_each_operation() -> None:
    for word in philox.words(3, "test normal", 0, 300):
        t = f32(Fraction(2 * (int(word) >> 8) + 1 - 2**24, 2**24))
        z = f32(as_fraction(t) * as_fraction(exact_horner(constants.NORMAL, f32(as_fraction(t) ** 2))))
        assert elementary.normal_cut(word.reshape(1))[0] == z


def bits_of(function: Function) -> str:
    """Digest of the function's bits over a million random words; log2 over positive normal numbers only."""
    if function is elementary.normal_cut:
        return hashlib.blake2s(function(philox.words(7, "test words", 0, 1 << 20))).hexdigest()[:16]
    x = random_floats(1 << 20)
    if function is elementary.log2:
        x = x[(x >= np.float32(2.0**-126)) & np.isfinite(x)]
    with np.errstate(all="ignore"):
        return hashlib.blake2s(function(x)).hexdigest()[:16]


PINNED = [
    (elementary.exp2, "6ebd8fbe1bbbbb36"),
    (elementary.log2, "60315d0d224b7470"),
    (elementary.sigmoid, "71d49c1a0fabb919"),
    (elementary.normal_cut, "e133cfb3a36caa81"),
]


@pytest.mark.parametrize(("function", "pin"), PINNED)
def test_bits_are_pinned_whatever_becomes_of_subnormals(function: Function, pin: str) -> None:
    assert bits_of(function) == pin
    assert torch.set_flush_denormal(True)  # this thread's FTZ and DAZ, for NumPy too
    try:
        assert bits_of(function) == pin
    finally:
        torch.set_flush_denormal(False)


def test_values_at_the_edges() -> None:
    x = np.array([-np.inf, np.nan, -32.00001, -32, -1, -0.0, 0, 1, 127, 128, np.inf], np.float32)
    expected = [0, 0, 0, 2.0**-32, 0.5, 1, 1, 2, 2.0**127, 2.0**127, 2.0**127]
    assert elementary.exp2(x).tolist() == expected
    assert elementary.log2(np.exp2(np.arange(-126, 128)).astype(np.float32)).tolist() == list(range(-126, 128))
    x = np.array([-np.inf, -22.2, 0, -0.0, 40, np.inf, np.nan], np.float32)
    assert elementary.sigmoid(x).tolist() == [0, 0, 0.5, 0.5, 1, 1, 0]


@pytest.mark.parametrize("function", [elementary.exp2, elementary.log2, elementary.sigmoid])
def test_every_shape_and_layout_gives_the_same_bits(function: Function) -> None:
    x = np.abs(random_floats(2_000)[:1_920]).reshape(3, 5, 128)
    with np.errstate(all="ignore"):
        whole = function(x)
        assert whole.dtype == np.float32 and whole.shape == x.shape
        for n in (1, 2, 127, 128, 129):
            assert function(x.ravel()[:n]).tobytes() == whole.ravel()[:n].tobytes()


# Accuracy: the distance to the truth.


def test_exp2_is_within_1e_7_of_the_truth() -> None:
    x = spread(-32, 0.5)
    assert np.max(np.abs(elementary.exp2(x) / np.exp2(x.astype(np.float64)) - 1)) < 1e-7


def test_log2_is_within_8e_8_of_the_truth_and_relatively_close_beside_1() -> None:
    first = int(constants.ROOT_HALF_BITS)
    m = np.arange(first, first + (1 << 23), 3, dtype=np.int32).view(np.float32)
    m = m[m != 1]
    truth = np.log2(m.astype(np.float64))
    error = np.abs(elementary.log2(m) - truth)
    assert np.max(error) < 8e-8 and np.max(error / np.abs(truth)) < 1.8e-7


def test_sigmoid_is_within_1e_7_of_the_truth() -> None:
    x = spread(-40, 40)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    error = np.abs(elementary.sigmoid(x) - truth)
    assert np.max(error) < 1e-7 and np.max((error / truth)[x > -22]) < 1.2e-6


def test_normal_is_within_3e_4_of_the_quantile_odd_and_inside_the_cut() -> None:
    cells = np.arange(0, 2**24, dtype=np.uint32) << np.uint32(8)
    z = elementary.normal_cut(cells)
    t = torch.from_numpy((2 * np.arange(2**24) + 1 - 2.0**24) * 2.0**-24)
    truth = (2**0.5 * torch.erfinv(t * torch.erf(torch.tensor(2**0.5, dtype=torch.float64)))).numpy()
    assert np.max(np.abs(z - truth)) < 3e-4
    assert (z == -z[::-1]).all() and np.max(z) < 2 and np.min(np.abs(z)) > 0
    assert abs(np.std(z.astype(np.float64)) - 0.8796) < 1e-4


def test_float64_truths_are_truths() -> None:
    """The tests above lean on float64 libraries; mpmath agrees with them far below their tolerances."""
    for x in (-31.7, -0.3, 0.49):
        assert abs(mpmath.power(2, x) / np.exp2(x) - 1) < 1e-12
    for t in (0.1, 0.7, 0.999999):
        share = t * mpmath.erf(mpmath.sqrt(2))
        assert abs(mpmath.erfinv(share) - torch.erfinv(torch.tensor(float(share), dtype=torch.float64)).item()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EXP2", "LOG2", "NORMAL"])
def test_the_committed_coefficients_are_the_derived_ones(name: str) -> None:
    assert [int(value.view(np.uint32)) for value in getattr(constants, name)] == DERIVATIONS[name]()


def test_single_constants_are_the_nearest_float32() -> None:
    with mpmath.workprec(200):
        assert constants.LOG2_E == f32(1 / mpmath.log(2)) and constants.LN_2 == f32(mpmath.log(2))
        assert np.int32(constants.ROOT_HALF_BITS).view(np.float32) == f32(mpmath.sqrt(mpmath.mpf(1) / 2))
