"""Leaves of a large shard are read in part, verified by their paths, and never believed otherwise."""

import os

import numpy as np
import pytest

from storage.corpus.manifest import Manifest
from storage.errors import WindowFault
from storage.store import MemoryStore
from storage.windows import WindowReader
from tests.storage.corpus.mixes import prepared
from tests.storage.counting import Counting

SHARD = 700  # windows: 22 chunks of leaves, the last of 28
ROWS = np.array([699, 3, 40, 41, 690, 3, 33])  # of chunks 0, 1 and 21
LEAVES, PROOFS = "windows/rows/train/00000.leaves", "windows/rows/train/00000.proofs"
WAY = 5 * 32
PROOF = WAY + 1024


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore("leaves")
    manifest = prepared(tmp_path_factory.mktemp("mix"), store, seq_len=3, shard_windows=SHARD)[1]
    assert manifest.mix.sources[0].train.windows > SHARD + 32
    return store, manifest


def reader(manifest: Manifest, store: MemoryStore | Counting) -> WindowReader:
    return WindowReader(manifest, store, "", 0, "train")


def flipped(store: MemoryStore, key: str, at: int) -> MemoryStore:
    copy = MemoryStore(os.urandom(8).hex())
    for name in store.list("windows/"):
        data = bytearray(store.read(name))
        if name == key:
            data[at] ^= 0x10
        copy.create(name, bytes(data))
    return copy


def test_only_the_leaves_wanted_are_read_and_once(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    counting = Counting(store)
    some, whole = reader(manifest, counting), reader(manifest, store).read(np.arange(SHARD))
    for _ in range(2):
        assert np.array_equal(some.read(ROWS), whole[ROWS])
        assert not counting.whole and LEAVES not in counting.ranges
        assert counting.ranges[PROOFS] == 2 * PROOF + WAY + 28 * 32
    assert some.leaves(ROWS) == [store.read(LEAVES)[32 * row : 32 * row + 32] for row in ROWS]


def test_most_of_a_shard_is_read_whole(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    counting = Counting(store)
    reader(manifest, counting).leaves(np.arange(0, SHARD, 32))
    assert counting.whole == {LEAVES: SHARD * 32} and not counting.ranges


def test_a_mix_without_proofs_reads_the_same(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    files = {key: file for key, file in manifest.files.items() if not key.endswith(".proofs")}
    counting = Counting(store)
    older = reader(manifest.model_copy(update={"files": files}), counting)
    assert np.array_equal(older.read(ROWS), reader(manifest, store).read(ROWS))
    assert counting.whole == {LEAVES: SHARD * 32} and PROOFS not in counting.ranges


@pytest.mark.parametrize(
    ("key", "at", "said"),
    [
        (PROOFS, PROOF + WAY + 32 * 18, r"00000\.proofs: the leaves of windows 32 to 63 lead to digest"),
        (PROOFS, 21 * PROOF + WAY + 28 * 32 - 1, "the leaves of windows 672 to 699 lead to"),
        (PROOFS, 1 * PROOF + 40, "windows 32 to 63"),
    ],
)
def test_a_flipped_bit_is_found_and_spares_the_others(
    mix: tuple[MemoryStore, Manifest], key: str, at: int, said: str
) -> None:
    store, manifest = mix
    damaged = reader(manifest, flipped(store, key, at))
    for _ in range(2):  # what was found wrong is not kept
        with pytest.raises(WindowFault, match=said):
            damaged.read(ROWS)
    assert np.array_equal(damaged.read(np.array([100, 3])), reader(manifest, store).read(np.array([100, 3])))


def test_an_exchanged_leaf_and_window_are_found(mix: tuple[MemoryStore, Manifest]) -> None:
    """Both fit each other, so only the path tells."""
    store, manifest = mix
    copy = flipped(store, "", 0)
    for key, start, size in ((PROOFS, WAY, 32), ("windows/rows/train/00000.arrow", manifest_rows(manifest), 8)):
        data = bytearray(copy.read(key))
        two = bytes(data[start : start + 2 * size])
        data[start : start + 2 * size] = two[size:] + two[:size]
        copy.delete(key)
        copy.create(key, bytes(data))
    with pytest.raises(WindowFault, match="windows 0 to 31 lead to digest"):
        reader(manifest, copy).read(np.array([0, 1]))


def manifest_rows(manifest: Manifest) -> int:
    return manifest.files["windows/rows/train/00000.arrow"].rows_at
