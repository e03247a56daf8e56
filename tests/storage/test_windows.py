import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.corpus.manifest import Manifest
from storage.errors import InputFault
from storage.store import LocalStore, MemoryStore
from storage.stream import Stream
from storage.windows import WindowReader, arrow_file, leaf
from tests.storage.corpus.mixes import prepared


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore("windows")
    return store, prepared(tmp_path_factory.mktemp("mix"), store)[1]


def changed(store: MemoryStore, key: str, at: int) -> MemoryStore:
    """A copy of the store with one bit of one object flipped."""
    copy = MemoryStore(os.urandom(8).hex())
    for name in store.list():
        data = bytearray(store.read(name))
        if name == key:
            data[at] ^= 0x10
        copy.create(name, bytes(data))
    return copy


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_any_arrow_reader_sees_the_rows_and_the_offset_finds_them(dtype: str) -> None:
    rows = np.random.default_rng(0).integers(0, 60_000, (5, 33)).astype(dtype)
    data, rows_at = arrow_file(rows)
    table = pa.ipc.open_file(data).read_all()
    assert table.column("ids").to_pylist() == rows.tolist()
    assert data[rows_at : rows_at + rows.nbytes] == rows.tobytes()


def test_rows_in_any_order_with_repeats(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    reader = WindowReader(manifest, store, "", 0, "train")
    whole = reader.read(np.arange(reader.windows.windows))
    picked = np.array([17, 3, 3, 4, 5, 0, 18, 9])
    assert np.array_equal(reader.read(picked), whole[picked])
    assert reader.leaves(picked) == [leaf(row.tobytes()) for row in whole[picked]]
    assert reader.read(np.empty(0, np.int64)).shape == (0, 32)


def test_only_the_rows_wanted_are_read(mix: tuple[MemoryStore, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = mix
    asked: list[tuple[str, int]] = []
    inner = MemoryStore.read_range
    monkeypatch.setattr(
        MemoryStore, "read_range", lambda self, *a: (asked.append((a[0], a[2])), inner(self, *a))[1]
    )  # fmt: skip
    WindowReader(manifest, store, "", 0, "train").read(np.array([9, 10, 11, 14]))
    assert asked == [("windows/rows/train/00001.arrow", 3 * 64), ("windows/rows/train/00001.arrow", 64)]


def test_a_flipped_bit_names_file_shard_and_window_and_spares_the_others(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    key = "windows/texts/train/00002.arrow"
    bad = changed(store, key, manifest.files[key].rows_at + 3 * 64 + 5)
    reader = WindowReader(manifest, bad, "", 1, "train")
    with pytest.raises(InputFault, match=r"00002.arrow: window 3 of shard 2 \(window 19 of this source\)") as error:
        reader.read(np.array([18, 19]))
    assert error.value.exit_code == 11
    good = WindowReader(manifest, store, "", 1, "train")
    assert np.array_equal(reader.read(np.array([18, 20])), good.read(np.array([18, 20])))


def test_a_flipped_bit_in_the_leaves(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    bad = changed(store, "windows/rows/held_out/00000.leaves", 40)
    with pytest.raises(InputFault, match=r"00000\.leaves has digest"):
        Stream(manifest, bad).held_out()


def test_a_shard_that_is_cut_off_or_missing(mix: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = mix
    short = MemoryStore(os.urandom(8).hex())
    for key in store.list("windows/rows/"):
        if key.endswith("00000.arrow"):
            short.create(key, store.read(key)[: manifest.files[key].rows_at + 100])
        elif not key.endswith("00001.arrow"):
            short.create(key, store.read(key))
    reader = WindowReader(manifest, short, "", 0, "train")
    with pytest.raises(InputFault, match="bytes"):
        reader.read(np.array([5]))
    with pytest.raises(InputFault, match=r"there is no windows/rows/train/00001\.arrow"):
        reader.read(np.array([8]))


def test_a_local_folder_under_a_prefix(mix: tuple[MemoryStore, Manifest], tmp_path: Path) -> None:
    store, manifest = mix
    local = LocalStore(tmp_path)
    for key in store.list():
        local.create(f"mix/{key}", store.read(key))
    stream = Stream.open(local, "mix/", manifest.root)
    assert np.array_equal(stream.windows(0, 40), Stream(manifest, store).windows(0, 40))
    assert np.array_equal(stream.held_out(), Stream(manifest, store).held_out())
