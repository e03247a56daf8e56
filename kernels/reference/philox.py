"""Randomness as a function: Philox4x32-10 of (seed, purpose, logical index).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. There is no generator state:
word i of a purpose is the same whoever asks, in any order, in any piece.

    key      = low and high half of the seed
    counter  = low and high half of i // 4, then 64 bits of BLAKE2s of the purpose
    word i   = element i % 4 of the block
"""

from __future__ import annotations

import hashlib

import numpy as np

U32, U64 = np.uint32, np.uint64
MULTIPLIERS = (U64(0xD2511F53), U64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
CHUNK_BLOCKS = 1 << 18  # bounds the working memory; no result depends on it


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Blocks uint32 [N, 4] of the counters uint32 [N, 4] under a key of two 32-bit integers."""
    c0, c1, c2, c3 = (np.ascontiguousarray(counter[:, i], U32) for i in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 32 x 32 bits, exact in uint64
        high0, low0 = (product0 >> U64(32)).astype(U32), product0.astype(U32)
        high1, low1 = (product1 >> U64(32)).astype(U32), product1.astype(U32)
        c0, c1, c2, c3 = high1 ^ c1 ^ U32(k0), low1, high0 ^ c3 ^ U32(k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1)


def purpose_words(purpose: str) -> tuple[int, int]:
    """The two 32-bit counter words which stand for a purpose: its BLAKE2s of 8 bytes, little-endian."""
    tag = hashlib.blake2s(purpose.encode(), digest_size=8).digest()
    return int.from_bytes(tag[:4], "little"), int.from_bytes(tag[4:], "little")


def words(seed: int, purpose: str, first: int, count: int) -> np.ndarray:
    """Words first … first+count-1 of (seed, purpose), uint32 [count]; raises ValueError outside 64 bits."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; a seed is an integer from 0 to 2^64 - 1")
    if first < 0 or count < 0 or first + count > 2**63:
        raise ValueError(f"words {first} to {first + count} do not exist; indices run from 0 to 2^63 - 1")
    key, tag = (seed & 0xFFFFFFFF, seed >> 32), purpose_words(purpose)
    out = np.empty(count, U32)
    done = 0
    while done < count:
        block, skip = divmod(first + done, 4)
        taken = min(count - done, 4 * CHUNK_BLOCKS - skip)
        index = U64(block) + np.arange((skip + taken + 3) // 4, dtype=U64)
        counter = np.empty((index.size, 4), U32)
        counter[:, 0], counter[:, 1] = index.astype(U32), (index >> U64(32)).astype(U32)
        counter[:, 2], counter[:, 3] = tag
        out[done : done + taken] = philox(counter, key).reshape(-1)[skip : skip + taken]
        done += taken
    return out
