"""Fingerprints: committed values, the fast form against the definition, and linearity."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.cpu.fingerprint import BLOCK
from kernels.cpu.fingerprint import fingerprint as fast
from kernels.reference.fingerprint import PRIME, coefficients
from kernels.reference.fingerprint import fingerprint as defined

EDGES = [-(2**63), 2**63 - 1, 0, 1, -1, PRIME, -PRIME, PRIME - 1, 2**62, -(2**62) - 1]
# (elements of ramp(), seed, purpose) → φ, computed once by the definition; any change of it is another definition.
VECTORS = {
    (0, 1, "x"): 0,
    (1, 0, "fingerprint"): 1_814_323_713_561_538_842,
    (7, 2**64 - 1, "fingerprint 0"): 411_643_138_082_989_379,
    (1001, 0x0123456789ABCDEF, "fingerprint 1"): 1_603_230_258_318_871_336,
}


def ramp(count: int) -> np.ndarray:
    """int64 of both signs and all sizes."""
    return np.array([(-1) ** i * (i + 3) ** 5 for i in range(count)], np.int64)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    """int64 of the whole range, its edges first."""
    found = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count, np.int64, endpoint=True)
    found[: len(EDGES)] = EDGES[:count]
    return found


@pytest.mark.parametrize("function", [defined, fast])
def test_committed_values(function: Callable[[np.ndarray, int, str], int]) -> None:
    assert {case: function(ramp(case[0]), *case[1:]) for case in VECTORS} == VECTORS


def test_coefficients_are_61_bits_of_philox_words() -> None:
    """The first, written out: low word, then high word, the three lowest bits gone."""
    from kernels.reference.philox import words

    low, high = (int(word) for word in words(5, "x", 6, 2))
    assert coefficients(5, "x", 4)[3] == (high << 32 | low) >> 3
    assert coefficients(5, "x", 1000).max() <= PRIME


@pytest.mark.parametrize("count", [1, 2, 3, 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_the_fast_form_is_the_definition(count: int) -> None:
    tensor = drawn(count)
    assert fast(tensor, 2**64 - 5, "t") == defined(tensor, 2**64 - 5, "t")


def test_shape_does_not_count_but_order_does() -> None:
    tensor = drawn(12)
    assert fast(tensor.reshape(3, 4), 1, "t") == fast(tensor, 1, "t") == fast(tensor.reshape(2, 6)[:, ::1], 1, "t")
    assert fast(tensor.reshape(3, 4).T, 1, "t") == defined(tensor.reshape(3, 4).T, 1, "t") != fast(tensor, 1, "t")


def test_it_is_linear_modulo_the_prime() -> None:
    parts = [np.random.default_rng(i).integers(-(2**50), 2**50, 5000) for i in range(5)]
    assert sum(fast(part, 3, "t") for part in parts) % PRIME == fast(sum(parts), 3, "t")


@pytest.mark.parametrize("place", [0, 1, 2499, 4999])
@pytest.mark.parametrize("change", [1, -1, 2**40])
def test_a_changed_element_is_seen_whatever_the_key(place: int, change: int) -> None:
    tensor = np.random.default_rng(0).integers(-(2**50), 2**50, 5000)
    changed = tensor.copy()
    changed[place] += change
    assert all(fast(tensor, seed, "t") != fast(changed, seed, "t") for seed in range(20))


def test_another_seed_or_purpose_is_another_fingerprint() -> None:
    tensor = drawn(100)
    keys = [(0, "a"), (1, "a"), (2**32, "a"), (0, "b"), (0, "")]
    assert len({fast(tensor, *key) for key in keys}) == len(keys)


@pytest.mark.parametrize(("dtype", "seed"), [(np.float32, 0), (np.int32, 0), (np.int64, -1), (np.int64, 2**64)])
def test_another_type_or_seed_is_refused(dtype: type, seed: int) -> None:
    with pytest.raises(ValueError, match="a fingerprint is of int64"):
        fast(np.zeros(3, dtype), seed, "t")
