"""Host numbers: the one rounding against NumPy's, constants against exact fractions, tables against mpmath."""

from __future__ import annotations

import threading
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from kernels.interface import AdamScalars
from model import host
from model.spec import OptimizerSpec


def bits(value: np.float32) -> int:
    return int(value.view(np.uint32))


def every_kind_of_float32() -> np.ndarray:
    """Positive float32: random ones of every exponent, subnormals, powers of two and their neighbours."""
    rng = np.random.default_rng(0)
    edges = [base + delta for base in range(0, 0x7F800000, 0x800000) for delta in (-1, 0, 1)]
    words = np.array([*edges[1:], 0x7F7FFFFF, *rng.integers(1, 0x7F800000, 500)], dtype=np.uint32)
    return words.view(np.float32)


def test_a_float32_survives() -> None:
    for value in every_kind_of_float32():
        assert bits(host.f32(Fraction(float(value)))) == bits(value)
        assert bits(host.f32(-Fraction(float(value)))) == bits(-value) or value == 0


def test_midpoints_go_to_even_and_a_hair_decides() -> None:
    for value in every_kind_of_float32():
        low = bits(value)
        if low + 1 >= 0x7F800000:
            continue
        above = np.uint32(low + 1).view(np.float32)
        middle = (Fraction(float(value)) + Fraction(float(above))) / 2
        hair = middle / 2**200
        assert bits(host.f32(middle)) == low + (low & 1)
        assert bits(host.f32(middle - hair)) == low
        assert bits(host.f32(middle + hair)) == low + 1


def test_double_rounding_would_be_wrong_and_is_not_done() -> None:
    value = Fraction(1) + Fraction(1, 2**24) + Fraction(1, 2**80)  # float64 loses the last term and meets a tie
    assert host.f32(value) == np.float32(1 + 2**-23)
    assert np.float32(float(value)) == np.float32(1)


def test_zero_overflow_and_underflow() -> None:
    assert bits(host.f32(0)) == bits(host.f32("0.000")) == bits(host.f32("-0.0")) == 0
    assert bits(host.f32(Fraction(1, 2**150))) == 0
    assert bits(host.f32(Fraction(1, 2**149))) == 1
    largest = (2**24 - 1) * 2**104
    assert bits(host.f32(largest + 2**103 - 1)) == 0x7F7FFFFF
    with pytest.raises(OverflowError, match="exceeds float32"):
        host.f32(largest + 2**103)


@pytest.mark.parametrize(
    "text", ["1e-5", " 0.1", "0.1 ", "+1", ".5", "5.", "nan", "inf", "1_0", "00.1", "1/3", "", "٣"]
)
def test_only_plain_decimals_are_exact(text: str) -> None:
    with pytest.raises(ValueError, match="not a plain decimal"):
        host.exact(text)


def test_floats_are_refused() -> None:
    with pytest.raises(TypeError, match="float is not exact"):
        host.f32(0.1)
    with pytest.raises(ValueError, match="not a finite number"):
        host.f32(np.float32("nan"))
    with pytest.raises(ValueError, match="not a finite number"):
        host.f32(mpmath.inf)


def test_mpf_enters_exactly() -> None:
    with mpmath.workprec(300):
        assert host.as_fraction(mpmath.mpf(3) / 2**250) == Fraction(3, 2**250)
        assert host.as_fraction(-(mpmath.mpf(2) ** 90)) == -(2**90)


def test_mean_scale() -> None:
    assert host.mean_scale(8192) == np.float32(2.0**-37)
    assert host.mean_scale(12_288) == host.f32(Fraction(1, 12_288 * 2**24))
    with pytest.raises(ValueError, match="0 tokens"):
        host.mean_scale(0)


def scalars_of(lr: np.float32, t: int, decays: bool = True) -> AdamScalars:
    return host.adam_scalars(OptimizerSpec(), lr, t, decays, mean=host.mean_scale(8192), clip=np.float32(1))


@pytest.mark.parametrize("t", [1, 2, 3, 15, 100, 1000])
def test_adam_scalars_are_exact_fractions_rounded_once(t: int) -> None:
    lr = host.f32("0.00045")
    scalars = scalars_of(lr, t)
    assert scalars.correction1 == host.f32(1 / (1 - Fraction(9, 10) ** t))
    assert scalars.correction2 == host.f32(1 / (1 - Fraction(19, 20) ** t))
    assert scalars.decay == host.f32(1 - Fraction(float(lr)) / 10)
    assert scalars.one_minus_beta2 == host.f32(Fraction(1, 20))
    assert scalars.one_minus_beta2 != np.float32(1) - scalars.beta2
    assert all(isinstance(value, np.float32) for value in scalars)


def test_no_decay_is_a_factor_of_exactly_one() -> None:
    assert scalars_of(host.f32("0.1"), 1, decays=False).decay == 1


def test_updates_count_from_one() -> None:
    with pytest.raises(ValueError, match="update number is 0"):
        scalars_of(host.f32("0.1"), 0)


def test_rope_tables_are_the_truth_rounded_once() -> None:
    cos, sin = host.rope_tables(4096, 128, 500_000)
    assert cos.shape == sin.shape == (4096, 64) and cos.dtype == sin.dtype == np.float32
    rng = np.random.default_rng(2)
    places = [(0, 0), (4095, 0), (4095, 63), (1, 63), *rng.integers(0, (4096, 64), (500, 2)).tolist()]
    with mpmath.workprec(300):
        for t, i in places:
            angle = t * mpmath.power(500_000, -mpmath.mpf(2 * i) / 128)
            assert bits(cos[t, i]) == bits(host.f32(mpmath.cos(angle)))
            assert bits(sin[t, i]) == bits(host.f32(mpmath.sin(angle)))


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    short, long = host.rope_tables(100, 64, 10_000), host.rope_tables(300, 64, 10_000)
    for a, b in zip(short, long, strict=True):
        assert a.tobytes() == b[:100].tobytes()


def test_tables_cannot_be_changed_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        host.rope_tables(100, 64, 10_000)[0][0, 0] = 2


def test_other_peoples_precision_is_neither_used_nor_changed() -> None:
    before = mpmath.mp.prec
    expected = scalars_of(host.f32("0.001"), 77)
    seen = []
    with mpmath.workprec(10):
        thread = threading.Thread(target=lambda: seen.append(scalars_of(host.f32("0.001"), 77)))
        thread.start()
        thread.join()
        assert mpmath.mp.prec == 10
    assert seen == [expected] and mpmath.mp.prec == before
