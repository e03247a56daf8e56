"""Fingerprints modulo 2⁶¹ − 1, on every core. Definition: kernels/reference/fingerprint.py.

Integers alone, so neither the number of threads nor the order of the sum shows in it. A product of two numbers below
2⁶¹ is made of halves of 31 bits, and 2⁶¹ counts as 1: high bits are added to the low ones.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.initial import U32, philox
from kernels.cpu.numeric import OPTIONS, PARALLEL

PRIME = np.uint64(2**61 - 1)
HALF = np.uint64(2**31 - 1)
U3, U30, U31, U61 = (np.uint64(i) for i in (3, 30, 31, 61))
LOW_30 = np.uint64(2**30 - 1)
BLOCK = 1 << 14  # elements that one thread takes at a time; an even number


@exclusive
def fingerprint(tensor: np.ndarray, seed: int, purpose: str) -> int:
    """φ of int64[...], 0 … 2⁶¹ − 2, under the coefficients of (seed, purpose). ValueError for another type or seed."""
    if tensor.dtype != np.int64 or not 0 <= seed < 2**64:
        raise ValueError(f"a fingerprint is of int64 under a seed of 64 bits, not of {tensor.dtype} under {seed}")
    tag = hashlib.blake2s(purpose.encode(), digest_size=8).digest()
    halves = (seed & 0xFFFFFFFF, seed >> 32, int.from_bytes(tag[:4], "little"), int.from_bytes(tag[4:], "little"))
    flat = np.ascontiguousarray(tensor).reshape(-1)
    parts = np.zeros(-(-flat.size // BLOCK), np.uint64)
    _fingerprint(*(np.uint64(half) for half in halves), flat, parts)
    return sum(parts.tolist()) % int(PRIME)


@njit(**PARALLEL)
def _fingerprint(key_0, key_1, tag_0, tag_1, flat, parts):
    for block in prange(parts.size):
        start, stop = block * BLOCK, min(flat.size, (block + 1) * BLOCK)
        total = np.uint64(0)
        for i in range(start // 2, (stop + 1) // 2):
            words = philox(np.uint64(i), tag_0, tag_1, key_0, key_1)
            total = _add(total, _times((words[0] | words[1] << U32) >> U3, _residue(flat[2 * i])))
            if 2 * i + 1 < stop:
                total = _add(total, _times((words[2] | words[3] << U32) >> U3, _residue(flat[2 * i + 1])))
        parts[block] = total


@njit(**OPTIONS)
def _residue(g):
    """int64 → its residue, 0 … p."""
    size = np.uint64(g) if g >= 0 else np.uint64(0) - np.uint64(g)
    size = _fold(size)
    return size if g >= 0 else PRIME - size


@njit(**OPTIONS)
def _times(a, b):
    """a·b modulo p, 0 … p, of 0 ≤ a, b ≤ 2⁶¹ − 1."""
    a_1, a_0, b_1, b_0 = a >> U31, a & HALF, b >> U31, b & HALF
    middle = a_1 * b_0 + a_0 * b_1  # counts 2³¹; below 2⁶²
    # 2⁶²·a₁b₁ ≡ 2·a₁b₁; of the middle 2⁶¹ goes round to 1.
    high = a_1 * b_1 + a_1 * b_1 + (middle >> U30) + ((middle & LOW_30) << U31)  # below 2⁶² + 2³³
    return _fold(_fold(high) + _fold(a_0 * b_0))


@njit(**OPTIONS)
def _add(a, b):
    """a + b modulo p, 0 … p, of the same."""
    return _fold(a + b)


@njit(**OPTIONS)
def _fold(x):
    """uint64 → a number 0 … p of the same residue."""
    x = (x & PRIME) + (x >> U61)  # at most p + 7
    return x - PRIME if x > PRIME else x
