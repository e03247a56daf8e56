"""Leaf digests by Triton's kernels: the bytes of `kernels.digest`, whatever the shape."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from kernels import digest
from kernels.nvidia import digest as device
from kernels.nvidia import digest_kernels

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))

# (lanes of a program, shapes, type): the interpreter takes 0.15 s a compression, however many lanes there are.
CASES = [
    (128, [(), (1,), (16,), (17,), (0,), (0, 5), (5, 0), (1, 1), (17,)], "f4"),
    (2, [(520,)], "f4"),  # chunks of 256, 256 and 8 words in two programs; a node that rises
    # Whole chunks: leaves of 66, 66 and 22, merged by two programs.
    pytest.param(1024, [(7, 5632)] * 2, "f4", marks=pytest.mark.slow),
    # Leaves of 68 and 4 chunks, the last of each shorter.
    pytest.param(1024, [(18, 511)], "i8", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("lanes, shapes, kind", CASES)
def test_leaves_are_the_host_s(
    lanes: int, shapes: list[tuple[int, ...]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHUNK_LANES", lanes)
    monkeypatch.setattr(device, "MERGE_LANES", max(8, lanes // 4))
    monkeypatch.setattr(device, "MERGE_LEAVES", 4)
    arrays = {f"{i} of {shape}": random(i, shape, kind) for i, shape in enumerate(shapes)}
    check(arrays)


def test_tensors_of_one_size_are_hashed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch)
    arrays = {"a": random(1, (6,), "f4"), "b": random(2, (3,), "f4"), "c": random(3, (3,), "i8")}
    check(arrays)
    assert [(name, grid) for name, grid, _ in launched] == [
        ("chunk_kernel", (2,)),  # a and c
        ("merge_kernel", (1,)),
        ("chunk_kernel", (1,)),
        ("merge_kernel", (1,)),
    ]


def test_tensors_that_exceed_the_scratch_memory_are_hashed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch)
    monkeypatch.setattr(device, "MAX_NODES", 2)
    check({str(i): random(i, (3,), "f4") for i in range(5)})
    assert [grid for name, grid, _ in launched if name == "chunk_kernel"] == [(2,), (2,), (1,)]


def test_only_aligned_whole_chunks_are_read_in_wide_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch, run=False)
    x = torch.zeros(3 * 256 + 4, dtype=torch.float32)
    assert x.data_ptr() % 16 == 0
    for start, stop in ((0, 256), (4, 260), (1, 257), (0, 255)):
        device.digests({"x": x[start:stop]})
    device.digests({"x": x[0:256], "y": x[257:513]})
    aligned = [constants["ALIGNED"] for name, _, constants in launched if name == "chunk_kernel"]
    assert aligned == [True, True, False, False, False]


def test_a_view_is_digested_by_its_values() -> None:
    x = torch.arange(30, dtype=torch.float32).reshape(5, 6).T[:, 1:]
    views = {"columns": x, "one": x[:1], "unaligned": torch.arange(5, dtype=torch.float32)[1:]}
    found = device.leaves_of(views)
    assert found == {name: digest.leaves(y.contiguous().numpy()) for name, y in views.items()}


def test_the_context_key_follows_from_the_context() -> None:
    context = b"verbatim 2026 leaf"
    key = compression(IV, struct.unpack("<16I", context.ljust(64, b"\0")), len(context), 1 | 2 | 8 | 32)
    names = ("K0", "K1", "K2", "K3", "K4", "K5", "K6", "K7")
    assert key == [getattr(digest_kernels, name).value for name in names]


def random(seed: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    words = np.random.default_rng(seed).integers(0, 2**32, (*shape, int(kind[1]) // 4), np.uint32)
    return words.view(kind).reshape(shape)


def check(arrays: dict[str, np.ndarray]) -> None:
    found = device.leaves_of({name: torch.from_numpy(array) for name, array in arrays.items()})
    assert found == {name: digest.leaves(array) for name, array in arrays.items()}


def launches(monkeypatch: pytest.MonkeyPatch, run: bool = True) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """What is launched from now on, in order: kernel, grid, constants."""
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    launch = device.launch

    def recorded(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel.fn.__name__, grid, constants))
        if run:
            launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(device, "launch", recorded)
    return launched


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
