"""The tree inside a shard's digest is that of `kernels.digest`, and leads nowhere else."""

import os

import numpy as np
import pytest

from kernels.digest import digest
from storage.leaf_tree import CHUNK, chunks_of, path_size, paths, roots

SIZES = [32, 64, 1024, 1056, 2048, 2080, 3072, 5120, 7 * 1024 + 992, 16 * 1024, 17 * 1024 + 32, 100 * 1024]


def pieces(data: bytes, purpose: str = "shard") -> tuple[list[bytes], list[bytes]]:
    """(chunks of the data, their paths)."""
    count = chunks_of(len(data))
    ways, size = paths(data, purpose), path_size(count)
    assert len(ways) == count * size
    return [data[i * CHUNK : (i + 1) * CHUNK] for i in range(count)], [
        ways[i * size : (i + 1) * size] for i in range(count)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("purpose", ["shard", "another"])
def test_every_chunk_leads_to_the_digest(size: int, purpose: str) -> None:
    data = os.urandom(size)
    chunks, ways = pieces(data, purpose)
    count = len(chunks)
    assert set(roots(chunks, np.arange(count), np.full(count, count), ways, purpose)) == {digest(data, purpose)}


def test_chunks_of_several_shards_at_once() -> None:
    shards = [os.urandom(size) for size in SIZES]
    chunks, ways, places, counts, expected = [], [], [], [], []
    for data in shards:
        some, their = pieces(data)
        for place in {0, len(some) // 2, len(some) - 1}:
            chunks.append(some[place])
            ways.append(their[place])
            places.append(place)
            counts.append(len(some))
            expected.append(digest(data, "shard"))
    assert roots(chunks, np.array(places), np.array(counts), ways, "shard") == expected


def test_another_chunk_path_place_or_length_leads_elsewhere() -> None:
    data = os.urandom(11 * CHUNK + 96)
    right = digest(data, "shard")
    chunks, ways = pieces(data)

    def root(chunk: bytes, place: int, count: int, way: bytes) -> str:
        return roots([chunk], np.array([place]), np.array([count]), [way], "shard")[0]

    def flipped(data: bytes, bit: int) -> bytes:
        return (int.from_bytes(data, "little") ^ (1 << bit)).to_bytes(len(data), "little")

    for place in (0, 7, 10, 11):
        chunk, way = chunks[place], ways[place]
        assert root(chunk, place, 12, way) == right
        assert all(root(flipped(chunk, bit), place, 12, way) != right for bit in range(0, 8 * len(chunk), 509))
        used = {0: 4, 7: 4, 10: 3, 11: 3}[place]  # 12 chunks, then 6, 3, 2: the last of 3 goes up alone
        zeros = [i for i in range(4) if way[32 * i : 32 * i + 32] == bytes(32)]
        assert len(zeros) == 4 - used
        for level in set(range(4)) - set(zeros):
            assert root(chunk, place, 12, flipped(way, 256 * level + 77)) != right
        assert root(chunk, place ^ 1, 12, way) != right
    assert root(chunks[11] + bytes(32), 11, 12, ways[11]) != right
    assert root(chunks[11][:-32], 11, 12, ways[11]) != right
