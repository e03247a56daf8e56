"""Windows in Arrow IPC files: uncompressed, fixed-size rows, a BLAKE3 leaf beside each.

    <base>windows/<source>/train/00000.arrow     one column "ids": FixedSizeList<uint16 or uint32>[window_tokens]
    <base>windows/<source>/train/00000.leaves    32 bytes per window, in order
    <base>windows/<source>/train/00000.proofs    of a large shard: 32 leaves at a time, after what verifies them alone
    <base>windows/<source>/held_out/...          the same for held-out windows

Any Arrow reader opens the files. Here a row is fetched by one ranged read at `rows_at + row * row bytes`, and verified
against its leaf; the leaves against the shard's digest in the manifest, all of them or, by their path, 32 at a time: a
shard of 16,384 windows has 512 KiB of leaves, and a step reads a few dozen windows of it. Leaves and path stand
together in one more file, since of a server a request of its own would cost a third of what it brings.
"""

import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from kernels.digest import digest
from storage.corpus.manifest import Manifest, Shard, StoredFile, Windows, stored
from storage.errors import InputFault, WindowFault
from storage.leaf_tree import CHUNK, chunks_of, path_size, paths, roots
from storage.store import Copies, Store, sound

LEAF = 32  # bytes
IN_CHUNK = CHUNK // LEAF
PROOFS_FROM = 16  # chunks of leaves in a shard; fewer are read whole
KEPT = 4096  # chunks of verified leaves that a reader keeps: 4 MiB
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
    objects = {f"{prefix}/{number:05d}.arrow": data, f"{prefix}/{number:05d}.leaves": leaves}
    if chunks_of(len(leaves)) >= PROOFS_FROM:
        objects[f"{prefix}/{number:05d}.proofs"] = _proofs(leaves)
    return entry, objects, rows_at


def _proofs(leaves: bytes) -> bytes:
    """The path of each chunk of the leaves, and after it the chunk."""
    count, beside = chunks_of(len(leaves)), paths(leaves, "shard")
    way = path_size(count)
    return b"".join(beside[i * way : (i + 1) * way] + leaves[i * CHUNK : (i + 1) * CHUNK] for i in range(count))


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
        self._leaves = Leaves(manifest, store, base, self._prefix, self.windows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """uint[n, window_tokens] for int64[n] rows; InputFault names shard and window if one differs from its leaf."""
        result = np.empty((len(rows), self._width), dtype=self._dtype)
        leaves = self.leaves(rows)
        shards, local = np.divmod(np.asarray(rows, dtype=np.int64), self._shard_windows)
        for shard in np.unique(shards).tolist():
            places = np.nonzero(shards == shard)[0]
            places = places[np.argsort(local[places], kind="stable")]
            for run in np.split(places, np.nonzero(np.diff(local[places]) != 1)[0] + 1):
                result[run] = self._run(shard, int(local[run[0]]), [leaves[place] for place in run.tolist()])
        self._check_ids(rows, result)
        return result

    def check(self) -> None:
        """Read every window, a shard at a time; InputFault for the first that differs."""
        for start in range(0, self.windows.windows, self._shard_windows):
            self.read(np.arange(start, min(start + self._shard_windows, self.windows.windows)))

    def leaves(self, rows: np.ndarray) -> list[bytes]:
        """The leaf of each row, from the side files, which are verified; the windows are not read."""
        shards, local = np.divmod(np.asarray(rows, dtype=np.int64), self._shard_windows)
        return self._leaves.of(shards.tolist(), local.tolist())

    def all_leaves(self) -> Iterator[bytes]:
        """The leaf of every window in order, one side file at a time."""
        for shard, entry in enumerate(self.windows.shards):
            leaves = self._leaves.whole(shard)
            yield from (leaves[row * LEAF : (row + 1) * LEAF] for row in range(entry.windows))

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

    def _run(self, shard: int, first: int, leaves: list[bytes]) -> np.ndarray:
        """Consecutive rows of a shard by one ranged read, each verified against its leaf."""
        key = f"{self._prefix}/{shard:05d}.arrow"
        data = sound(self._store, self._base + key, lambda store: self._verified(store, key, shard, first, leaves))
        return np.frombuffer(data, dtype=self._dtype).reshape(len(leaves), self._width)

    def _verified(self, store: Store, key: str, shard: int, first: int, leaves: list[bytes]) -> memoryview:
        count, size = len(leaves), self._width * self._dtype.itemsize
        rows_at = _file(store, self._manifest, key).rows_at
        data = memoryview(store.read_range(self._base + key, rows_at + first * size, count * size))
        for i in range(count):
            found, expected = leaf(data[i * size : (i + 1) * size]), leaves[i]
            if found != expected:
                raise WindowFault(
                    f"{store.uri}: {self._base}{key}: window {first + i} of shard {shard} "
                    f"(window {shard * self._shard_windows + first + i} of this source) has leaf {found.hex()}, "
                    f"expected {expected.hex()}",
                    cause="the window file was damaged or changed after it was prepared",
                    next_step="fetch this file again, or prepare the mix again in an empty folder",
                )
        return data


class Leaves:
    """The verified leaves of one part of one source: of a shard whole, or only the chunks that are asked for."""

    def __init__(self, manifest: Manifest, store: Store, base: str, prefix: str, windows: Windows) -> None:
        self._manifest, self._store, self._base = manifest, store, base
        self._prefix, self._shards = prefix, windows.shards
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def of(self, shards: list[int], rows: list[int]) -> list[bytes]:
        """The leaf of each row of each shard."""
        asked = [(shard, row // IN_CHUNK) for shard, row in zip(shards, rows, strict=True)]
        found = {each: self._kept[each] for each in asked if each in self._kept}
        missing: dict[int, list[int]] = {}
        for shard, chunk in sorted(set(asked) - set(found)):
            missing.setdefault(shard, []).append(chunk)
        found |= self._read(missing)
        self._keep(found)
        return [
            found[each][row % IN_CHUNK * LEAF : (row % IN_CHUNK + 1) * LEAF]
            for each, row in zip(asked, rows, strict=True)
        ]

    def whole(self, shard: int) -> bytes:
        """All leaves of a shard, by one read."""
        key = self._base + self._key(shard, "leaves")
        return sound(self._store, key, lambda store: self._whole(store, key, self._shards[shard]))

    def _whole(self, store: Store, key: str, entry: Shard) -> bytes:
        data = store.read(key, limit=entry.windows * LEAF)
        found = digest(data, "shard")
        if found != entry.digest:
            raise WindowFault(
                f"{store.uri}: {key} has digest {found}, expected {entry.digest}",
                cause="the leaves of this shard were damaged or changed after it was prepared",
                next_step="fetch this file again, or prepare the mix again in an empty folder",
            )
        return data

    def _key(self, shard: int, what: str) -> str:
        return f"{self._prefix}/{shard:05d}.{what}"

    def _keep(self, chunks: dict[tuple[int, int], bytes]) -> None:
        for each, data in chunks.items():
            self._kept[each] = data
            self._kept.move_to_end(each)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _read(self, chunks: dict[int, list[int]]) -> dict[tuple[int, int], bytes]:
        """These chunks of these shards: whichever of whole leaves and single chunks is the less to read."""
        found: dict[tuple[int, int], bytes] = {}
        alone: list[_Run] = []
        for shard, wanted in chunks.items():
            size = self._shards[shard].windows * LEAF
            way = path_size(chunks_of(size))
            if self._key(shard, "proofs") in self._manifest.files and len(wanted) * (CHUNK + way) < size:
                runs = np.split(wanted, np.nonzero(np.diff(wanted) != 1)[0] + 1)
                alone += [_Run(shard, int(run[0]), len(run)) for run in runs]
                continue
            whole = self.whole(shard)
            found |= {(shard, c): whole[c * CHUNK : (c + 1) * CHUNK] for c in range(chunks_of(size))}
        return found | (self._alone(alone) if alone else {})

    def _alone(self, runs: list["_Run"]) -> dict[tuple[int, int], bytes]:
        """The chunks of these runs, verified all at once. Of several copies each may be sound in other places: where
        none is in all of them, half of the runs are tried at a time."""
        key = self._base + self._key(runs[0].shard, "proofs")
        try:
            return sound(
                self._store, key, lambda store: self._check([c for run in runs for c in self._chunks(store, run)])
            )
        except WindowFault:
            if len(runs) == 1 or not isinstance(self._store, Copies):
                raise
        half = len(runs) // 2
        return self._alone(runs[:half]) | self._alone(runs[half:])

    def _chunks(self, store: Store, run: "_Run") -> Iterator["_Chunk"]:
        """Chunks with their paths, not verified; one read."""
        size = self._shards[run.shard].windows * LEAF
        way = path_size(chunks_of(size))
        length = run.count * way + min(run.count * CHUNK, size - run.first * CHUNK)
        data = store.read_range(self._base + self._key(run.shard, "proofs"), run.first * (way + CHUNK), length)
        for i in range(run.count):
            proof = data[i * (way + CHUNK) : (i + 1) * (way + CHUNK)]
            yield _Chunk(store.uri, run.shard, run.first + i, proof[way:], proof[:way])

    def _check(self, chunks: list["_Chunk"]) -> dict[tuple[int, int], bytes]:
        """The leaves of each, by shard and place."""
        counts = np.array([chunks_of(self._shards[chunk.shard].windows * LEAF) for chunk in chunks])
        places = np.array([chunk.place for chunk in chunks])
        found = roots([c.leaves for c in chunks], places, counts, [c.path for c in chunks], "shard")
        for chunk, root in zip(chunks, found, strict=True):
            entry, key = self._shards[chunk.shard], self._base + self._key(chunk.shard, "proofs")
            if root != entry.digest:
                first, last = chunk.place * IN_CHUNK, min((chunk.place + 1) * IN_CHUNK, entry.windows) - 1
                raise WindowFault(
                    f"{chunk.uri}: {key}: the leaves of windows {first} to {last} lead to digest {root}, "
                    f"expected {entry.digest}",
                    cause="they, or their path before them, were damaged or changed after the shard was prepared",
                    next_step="fetch this file again, or prepare the mix again in an empty folder",
                    key=key,
                )
        return {(chunk.shard, chunk.place): chunk.leaves for chunk in chunks}


@dataclass(frozen=True)
class _Run:
    """Consecutive chunks of a shard's leaves."""

    shard: int
    first: int
    count: int


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a shard's leaves with its path, as the store at `uri` has them."""

    uri: str
    shard: int
    place: int
    leaves: bytes
    path: bytes


def _file(store: Store, manifest: Manifest, key: str) -> StoredFile:
    if key not in manifest.files:
        raise InputFault(f"{store.uri}: the manifest does not list {key}")
    return manifest.files[key]
