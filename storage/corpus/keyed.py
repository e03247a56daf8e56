"""Keyed randomness of the stream: a key for each purpose, and a permutation that is a pure function of (key, n, index).

    key(seed, purpose, ...)     32 bytes: BLAKE3("stream key", canonical JSON of [seed, purpose, ...])
    permute(key, n, index)      a permutation of 0 .. n-1, any part of it, in any order, in constant time an element
    restore(key, n, index)      its inverse

The permutation is a Feistel network over the smallest domain 4^h (h >= 1) that holds n, walked until it lands below n
(at most four steps on average). It needs no memory, so that order never depends on workers, listing or what was read
before.

    index = left * 2^h + right; in each of 16 rounds (left, right) = (right, left ^ (mix(right ^ word) mod 2^h))
    words         BLAKE3("stream round keys", key + byte i) for i = 0 .. 3, one after another: 16 little-endian uint64
    mix(x)        SplitMix64's finaliser: x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27; x *= 0x94d049bb133111eb;
                  x ^= x >> 31, modulo 2^64
"""

from collections.abc import Callable

import numpy as np

from kernels import canonical
from kernels.digest import digest

Move = Callable[[np.ndarray, int, np.ndarray], np.ndarray]

ROUNDS = 16  # half-words of one or two bits need many; the cost is a few nanoseconds an element


def key(seed: int, *purpose: str | int) -> bytes:
    """The 32-byte key of one purpose, independent of every other purpose's."""
    return bytes.fromhex(digest(canonical.dumps([seed, *purpose]), "stream key"))


def permute(key: bytes, n: int, index: np.ndarray) -> np.ndarray:
    """Where `index` (integers below n) goes under the permutation of 0 .. n-1 that `key` says; int64."""
    return _walk(key, n, index, _feistel)


def restore(key: bytes, n: int, index: np.ndarray) -> np.ndarray:
    """What `permute` with this key and n sends to `index` (integers below n); int64."""
    return _walk(key, n, index, _unfeistel)


def _walk(key: bytes, n: int, index: np.ndarray, move: Move) -> np.ndarray:
    if not 0 < n < 2**62:
        raise ValueError(f"a permutation of {n} elements was asked for; 1 to 2^62 - 1 are possible")
    values = np.array(index, dtype=np.uint64)
    if values.size and int(values.max()) >= n:
        raise IndexError(f"index {int(values.max())} is not below {n}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    values = move(values, half, round_keys)
    while (outside := values >= n).any():
        values[outside] = move(values[outside], half, round_keys)
    return values.astype(np.int64)


def _round_keys(key: bytes) -> np.ndarray:
    expanded = bytes.fromhex("".join(digest(key + bytes([i]), "stream round keys") for i in range(ROUNDS // 4)))
    return np.frombuffer(expanded, dtype="<u8").astype(np.uint64)


def _feistel(values: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    """A bijection of 0 .. 4^half - 1."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _unfeistel(values: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    """The inverse of `_feistel`."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys[::-1]:
        left, right = right ^ (_mix(left ^ round_key) & mask), left
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every bit of the input moves every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
