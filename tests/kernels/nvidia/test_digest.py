"""Leaf digests by Triton's kernels: the bytes of `kernels.digest`, whatever the shape."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from kernels import digest
from kernels.nvidia import digest as device

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))

# (lanes of a program, shape, type): the interpreter takes 0.15 s a compression, however many lanes there are.
CASES = [
    *((128, shape, "f4") for shape in [(), (1,), (16,), (17,), (0,), (0, 5), (5, 0)]),
    (2, (600,), "f4"),  # chunks of 256, 256 and 88 words in two programs; a node that rises
    (1024, (7, 5632), "f4"),  # whole chunks: leaves of 66, 66 and 22, merged by two programs
    (1024, (18, 511), "i8"),  # leaves of 68 and 4 chunks, the last of each shorter
]


@pytest.mark.parametrize("lanes, shape, kind", CASES)
def test_leaves_are_the_host_s(lanes: int, shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CHUNK_LANES", lanes)
    monkeypatch.setattr(device, "MERGE_LANES", max(8, lanes // 8))
    monkeypatch.setattr(device, "MERGE_LEAVES", 2)
    words = np.random.default_rng(0).integers(0, 2**32, (*shape, int(kind[1]) // 4), np.uint32)
    array = words.view(kind).reshape(shape)
    assert device.leaves_of({"x": torch.from_numpy(array)}) == {"x": digest.leaves(array)}


def test_a_view_is_digested_by_its_values() -> None:
    x = torch.arange(30, dtype=torch.float32).reshape(5, 6).T[:, 1:]
    found = device.leaves_of({"x": x, "y": x[:1]})
    assert found == {name: digest.leaves(y.contiguous().numpy()) for name, y in (("x", x), ("y", x[:1]))}


def test_the_context_key_follows_from_the_context() -> None:
    context = b"verbatim 2026 leaf"
    key = compression(IV, struct.unpack("<16I", context.ljust(64, b"\0")), len(context), 1 | 2 | 8 | 32)
    names = ("K0", "K1", "K2", "K3", "K4", "K5", "K6", "K7")
    assert key == [getattr(device, name).value for name in names]


def compression(h: tuple[int, ...], message: tuple[int, ...], length: int, flags: int) -> list[int]:
    """BLAKE3's compression of block 0, from its specification (section 2.2), eight words."""
    v = [*h, *IV[:4], 0, 0, length, flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(COLUMNS + DIAGONALS):
            for word, first, second in ((message[2 * i], 16, 12), (message[2 * i + 1], 8, 7)):
                v[a] = (v[a] + v[b] + word) % 2**32
                v[d] = rotated(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) % 2**32
                v[b] = rotated(v[b] ^ v[c], second)
        message = tuple(message[i] for i in PERMUTATION)
    return [v[i] ^ v[i + 8] for i in range(8)]


def rotated(word: int, bits: int) -> int:
    return (word >> bits | word << (32 - bits)) % 2**32
