"""Fingerprints of integer tensors: one number, linear in the tensor, under coefficients that a public value fixes.

    φ = Σᵢ ρᵢ·gᵢ mod p        p = 2⁶¹ − 1, a prime; g int64; i over the elements in row order

ρᵢ are 61 bits of Philox words 2i and 2i + 1. Integers add exactly, so φ(g + h) = φ(g) + φ(h) mod p. Two tensors of
which every difference is less than p in size have one fingerprint with a probability below 2⁻⁵⁹, for whoever fixed
them before ρ was known. Beside the arithmetic contract: no step of a run uses it.
"""

from __future__ import annotations

import numpy as np

from kernels.reference.philox import words

PRIME = 2**61 - 1


def fingerprint(tensor: np.ndarray, seed: int, purpose: str) -> int:
    """φ of int64[...], 0 … PRIME − 1, under the coefficients of (seed, purpose)."""
    flat, rho = tensor.reshape(-1), coefficients(seed, purpose, tensor.size)
    return sum(int(r) * int(g) for r, g in zip(rho, flat)) % PRIME


def coefficients(seed: int, purpose: str, count: int) -> np.ndarray:
    """ρ₀ … ρ₍count−1₎: uint64, 0 … 2⁶¹ − 1. The even word of each pair is the low half; the three lowest bits go."""
    pairs = words(seed, purpose, 0, 2 * count).astype(np.uint64).reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << np.uint64(32)) >> np.uint64(3)
