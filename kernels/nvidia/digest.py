"""Leaf digests of device tensors: the bytes of `kernels.digest.leaves`, which says what a leaf is.

A step digests hundreds of tensors of few sizes, and a launch takes the host longer than hashing a small tensor takes
the device. So tensors of one size go in one pair of launches, which find them through a table of addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.digest import leaf_rows
from kernels.nvidia import digest_kernels
from kernels.nvidia.numbers import DEVICE, empty, launch

CHUNK_LANES, CHUNK_WARPS = 128, 4
MERGE_LANES, MERGE_WARPS, MERGE_LEAVES = 32, 1, 8
CHUNK_WORDS: int = digest_kernels.CHUNK_WORDS.value  # of 4 bytes
MAX_NODES = 8 * 2**20  # of a pair of launches: 64 bytes of scratch memory each, for 1 KiB of tensors
ALIGNMENT = 16  # bytes that a thread loads at once


class Size(NamedTuple):
    """How a tensor is cut. Tensors of one size are hashed together."""

    words: int
    leaf_words: int  # of every leaf but the last
    leaves: int
    chunks: int
    leaf_chunks: int  # of every leaf but the last


class Batch(NamedTuple):
    """Tensors of one size."""

    size: Size
    names: list[str]
    first: int  # the first one's place in the table
    leaf: int  # the first one's first leaf

    @property
    def nodes(self) -> int:
        """Places for nodes: those of the last leaf are not all used."""
        return len(self.names) * self.size.leaves * self.size.leaf_chunks


@lru_cache(maxsize=4096)
def size_of(shape: tuple[int, ...], itemsize: int) -> Size:
    """The size of a tensor of this shape with elements of 4 or 8 bytes."""
    words = math.prod(shape) * itemsize // 4
    leaf_words = max(1, min(words, leaf_rows(shape, itemsize) * (words // max(1, shape[0] if shape else 1))))
    leaves, leaf_chunks = triton.cdiv(words, leaf_words), triton.cdiv(leaf_words, CHUNK_WORDS)
    rest = words - (leaves - 1) * leaf_words
    chunks = (leaves - 1) * leaf_chunks + triton.cdiv(rest, CHUNK_WORDS) if leaves else 0
    return Size(words, leaf_words, leaves, chunks, leaf_chunks)


def digests(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, slice]]:
    """(Leaf digests i32[leaves, 8] on the device, the rows of each tensor) of device tensors, without waiting."""
    flat = {name: x.contiguous() for name, x in tensors.items()}  # they live until all is launched
    batches = list(_batches(flat))
    names = [name for batch in batches for name in batch.names]
    addresses = [flat[name].data_ptr() for name in names]
    table = torch.tensor(addresses, dtype=torch.int64).to(DEVICE)
    nodes = empty((16 * max((batch.nodes for batch in batches), default=0),), torch.int32)
    out = empty((sum(batch.size.leaves * len(batch.names) for batch in batches), 8), torch.int32)
    for batch in batches:
        here = addresses[batch.first : batch.first + len(batch.names)]
        _hash(batch, table, all(address % ALIGNMENT == 0 for address in here), nodes, out)
    return out, {name: rows for batch in batches for name, rows in _rows(batch)}


def leaves_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """`kernels.digest.leaves` of each device tensor: 32 bytes a leaf, in row order. Waits for the device once."""
    out, rows = digests(tensors)
    found = out.cpu().numpy()
    return {name: found[rows[name]].tobytes() for name in tensors}


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[Batch]:
    """The tensors by size, no more to a batch than MAX_NODES allow, but one."""
    groups: dict[Size, list[str]] = {}
    for name, x in tensors.items():
        groups.setdefault(size_of(x.shape, x.element_size()), []).append(name)
    first = leaf = 0
    for size, names in groups.items():
        count = max(1, MAX_NODES // max(1, size.leaves * size.leaf_chunks))
        for start in range(0, len(names), count):
            batch = Batch(size, names[start : start + count], first, leaf)
            yield batch
            first, leaf = first + len(batch.names), leaf + len(batch.names) * size.leaves


def _rows(batch: Batch) -> Iterator[tuple[str, slice]]:
    """The rows of each tensor's leaves."""
    for i, name in enumerate(batch.names):
        yield name, slice(batch.leaf + i * batch.size.leaves, batch.leaf + (i + 1) * batch.size.leaves)


def _hash(batch: Batch, table: Tensor, aligned: bool, nodes: Tensor, out: Tensor) -> None:
    """Launch the hashing of a batch, whose leaf digests go to its rows of out."""
    size, count = batch.size, len(batch.names)
    leaves, tiles = count * size.leaves, triton.cdiv(size.chunks, CHUNK_LANES)
    ragged = size.leaf_words % CHUNK_WORDS > 0 or size.words % CHUNK_WORDS > 0
    kinds = {"RAGGED": ragged, "ALIGNED": aligned and not ragged, "LANES": CHUNK_LANES, "num_warps": CHUNK_WARPS}
    cut = (size.words, size.chunks, size.leaf_words, size.leaf_chunks, batch.nodes)
    launch(digest_kernels.chunk_kernel, (count * tiles,), table, nodes, batch.first, *cut, tiles, 1, **kinds)
    kinds = {"LEAVES": MERGE_LEAVES, "LANES": MERGE_LANES, "num_warps": MERGE_WARPS}
    tree = (size.chunks, size.leaf_chunks, size.leaves, leaves)
    grid = (triton.cdiv(leaves, MERGE_LEAVES),)
    launch(digest_kernels.merge_kernel, grid, nodes, out[batch.leaf :], *tree, 1, **kinds)
