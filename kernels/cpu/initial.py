"""Initial weights by Philox4x32-10. Definitions: kernels/reference/initial.py, philox.py and elementary.normal_cut."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.numeric import NORMAL, OPTIONS, PARALLEL, add, f32_of_i32

U32 = np.uint64(32)
MASK = np.uint64(0xFFFFFFFF)
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEP_0, STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 10
BLOCK = 1 << 12  # counters that one thread takes at a time; each gives four words
CELL = np.float32(2.0**-24)


@exclusive
def initial_weights(seed: int, name: str, shape: tuple[int, ...], std: np.float32) -> np.ndarray:
    """f32[shape]: the standard normal cut at ±2σ, times std. Element i comes from word i of ("weights/" + name)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; a seed is an integer from 0 to 2^64 - 1")
    tag = hashlib.blake2s(f"weights/{name}".encode(), digest_size=8).digest()
    halves = (seed & 0xFFFFFFFF, seed >> 32, int.from_bytes(tag[:4], "little"), int.from_bytes(tag[4:], "little"))
    out = np.empty(math.prod(shape), np.float32)
    _initial_weights(*(np.uint64(half) for half in halves), np.float32(std), out)
    return out.reshape(shape)


@njit(**PARALLEL)
def _initial_weights(key_0, key_1, tag_0, tag_1, std, out):
    counters = (out.size + 3) // 4
    for block in prange((counters + BLOCK - 1) // BLOCK):
        for i in range(block * BLOCK, min(counters, (block + 1) * BLOCK)):
            words = philox(np.uint64(i), tag_0, tag_1, key_0, key_1)
            for lane in range(min(4, out.size - 4 * i)):
                out[4 * i + lane] = _normal_cut(np.uint32(words[lane])) * std


@njit(**OPTIONS)
def philox(index, c2, c3, k0, k1):
    """The four 32-bit words, as uint64, of counter (index, c2, c3) under the key (k0, k1)."""
    c0, c1 = index & MASK, index >> U32
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # 32 × 32 bits, exact in uint64
        c0, c1, c2, c3 = (product_1 >> U32) ^ c1 ^ k0, product_1 & MASK, (product_0 >> U32) ^ c3 ^ k1, product_0 & MASK
        k0, k1 = (k0 + STEP_0) & MASK, (k1 + STEP_1) & MASK
    return c0, c1, c2, c3


@njit(**OPTIONS)
def _normal_cut(word):
    """uint32 → float32: t in the middle of one of 2²⁴ cells of (−1, 1), then t·P(t²)."""
    half = np.int32(word >> np.uint32(8))
    t = f32_of_i32(add(add(half, half), np.int32(1 - 2**24))) * CELL
    x = t * t
    p = NORMAL[8]
    p = p * x + NORMAL[7]
    p = p * x + NORMAL[6]
    p = p * x + NORMAL[5]
    p = p * x + NORMAL[4]
    p = p * x + NORMAL[3]
    p = p * x + NORMAL[2]
    p = p * x + NORMAL[1]
    p = p * x + NORMAL[0]
    return t * p
