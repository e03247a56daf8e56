"""Windows in Arrow IPC files: uncompressed, fixed-size rows, a BLAKE3 leaf beside each.

    <base>windows/<source>/train/00000.arrow     one column "ids": FixedSizeList<uint16 or uint32>[window_tokens]
    <base>windows/<source>/train/00000.leaves    32 bytes per window, in order
    <base>windows/<source>/held_out/...          the same for held-out windows

Any Arrow reader opens the files. Here a row is fetched by one ranged read at `rows_at + row * row bytes`, and verified
against its leaf; the leaves against the shard's digest in the manifest.
"""

import io
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from kernels.digest import digest
from storage.corpus.manifest import Manifest, Shard, StoredFile, Windows, stored
from storage.errors import InputFault, WindowFault
from storage.store import Store

LEAF = 32  # bytes
PARTS = ("train", "held_out")


def leaf(window: bytes | memoryview) -> bytes:
    """The 32-byte leaf of one window's little-endian ids."""
    return bytes.fromhex(digest(window, "window"))


def shard_objects(prefix: str, number: int, windows: np.ndarray) -> tuple[Shard, dict[str, bytes], int]:
    """(its entry, its objects by key, where its rows begin) of a shard with these windows, uint[n, window_tokens]."""
    rows = np.ascontiguousarray(windows)
    leaves = b"".join(leaf(memoryview(row).cast("B")) for row in rows)
    data, rows_at = arrow_file(rows)
    entry = Shard(windows=len(rows), digest=digest(leaves, "shard"))
    return entry, {f"{prefix}/{number:05d}.arrow": data, f"{prefix}/{number:05d}.leaves": leaves}, rows_at


def stored_shard(objects: dict[str, bytes], rows_at: int) -> dict[str, StoredFile]:
    """The manifest's entries for the objects of one shard."""
    return {key: stored(data, rows_at if key.endswith(".arrow") else 0) for key, data in objects.items()}


def arrow_file(rows: np.ndarray) -> tuple[bytes, int]:
    """(bytes of an Arrow IPC file with these rows, where the first row begins in it)."""
    ids = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    batch = pa.record_batch([ids], names=["ids"])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    buffer = pa.py_buffer(data)
    column = pa.ipc.open_file(buffer).get_batch(0).column(0)
    return data, int(column.values.buffers()[1].address - buffer.address)


class WindowReader:
    """Verified windows of one part ("train" or "held_out") of one source."""

    def __init__(self, manifest: Manifest, store: Store, base: str, source: int, part: str) -> None:
        self._manifest, self._store, self._base = manifest, store, base
        entry = manifest.mix.sources[source]
        self.windows: Windows = getattr(entry, part)
        self._prefix = f"windows/{entry.name}/{part}"
        self._shard_windows: int = manifest.mix.spec.shard_windows
        self._dtype = np.dtype(manifest.mix.dtype)
        self._vocab = manifest.mix.tokenizer.vocab
        self._width = manifest.mix.window_tokens
        self._leaves: dict[int, bytes] = {}

    def read(self, rows: np.ndarray) -> np.ndarray:
        """uint[n, window_tokens] for int64[n] rows; InputFault names shard and window if one differs from its leaf."""
        result = np.empty((len(rows), self._width), dtype=self._dtype)
        shards, local = np.divmod(np.asarray(rows, dtype=np.int64), self._shard_windows)
        for shard in np.unique(shards).tolist():
            places = np.nonzero(shards == shard)[0]
            places = places[np.argsort(local[places], kind="stable")]
            for run in np.split(places, np.nonzero(np.diff(local[places]) != 1)[0] + 1):
                result[run] = self._run(shard, int(local[run[0]]), len(run))
        self._check_ids(rows, result)
        return result

    def check(self) -> None:
        """Read every window, a shard at a time; InputFault for the first that differs."""
        for start in range(0, self.windows.windows, self._shard_windows):
            self.read(np.arange(start, min(start + self._shard_windows, self.windows.windows)))

    def leaves(self, rows: np.ndarray) -> list[bytes]:
        """The leaf of each row, from the side files, which are verified; the windows are not read."""
        shards, local = np.divmod(np.asarray(rows, dtype=np.int64), self._shard_windows)
        return [self._leaf(s, r) for s, r in zip(shards.tolist(), local.tolist(), strict=True)]

    def all_leaves(self) -> Iterator[bytes]:
        """The leaf of every window in order, one side file at a time."""
        for shard, entry in enumerate(self.windows.shards):
            yield from (self._leaf(shard, row) for row in range(entry.windows))

    def _check_ids(self, rows: np.ndarray, windows: np.ndarray) -> None:
        """A mix root can cover ids that no tokenizer gives; a kernel must never see them."""
        wrong = np.argwhere(windows >= self._vocab)
        if len(wrong):
            row, place = wrong[0].tolist()
            raise WindowFault(
                f"{self._store.uri}: {self._base}{self._prefix}: window {int(rows[row])} of this source holds id "
                f"{int(windows[row, place])} at place {place}, the tokenizer has {self._vocab} ids",
                cause="whoever prepared the mix wrote windows that its tokenizer cannot have made",
                next_step="do not rely on this run; ask its publisher",
            )

    def _run(self, shard: int, first: int, count: int) -> np.ndarray:
        """`count` consecutive rows of a shard by one ranged read, each verified."""
        key = f"{self._prefix}/{shard:05d}.arrow"
        size = self._width * self._dtype.itemsize
        data = memoryview(
            self._store.read_range(self._base + key, self._file(key).rows_at + first * size, count * size)
        )
        for i in range(count):
            found, expected = leaf(data[i * size : (i + 1) * size]), self._leaf(shard, first + i)
            if found != expected:
                raise WindowFault(
                    f"{self._store.uri}: {self._base}{key}: window {first + i} of shard {shard} "
                    f"(window {shard * self._shard_windows + first + i} of this source) has leaf {found.hex()}, "
                    f"expected {expected.hex()}",
                    cause="the window file was damaged or changed after it was prepared",
                    next_step="fetch this file again, or prepare the mix again in an empty folder",
                )
        return np.frombuffer(data, dtype=self._dtype).reshape(count, self._width)

    def _leaf(self, shard: int, row: int) -> bytes:
        if shard not in self._leaves:
            self._leaves[shard] = self._read_leaves(shard)
        return self._leaves[shard][row * LEAF : (row + 1) * LEAF]

    def _read_leaves(self, shard: int) -> bytes:
        key, entry = f"{self._prefix}/{shard:05d}.leaves", self.windows.shards[shard]
        data = self._store.read(self._base + key, limit=entry.windows * LEAF)
        found = digest(data, "shard")
        if found != entry.digest:
            raise WindowFault(
                f"{self._store.uri}: {self._base}{key} has digest {found}, expected {entry.digest}",
                cause="the leaves of this shard were damaged or changed after it was prepared",
                next_step="fetch this file again, or prepare the mix again in an empty folder",
            )
        return data

    def _file(self, key: str) -> StoredFile:
        if key not in self._manifest.files:
            raise InputFault(f"{self._store.uri}: the manifest does not list {key}")
        return self._manifest.files[key]
