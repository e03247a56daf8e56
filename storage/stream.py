"""The data stream: window i of the run, for any i, on any machine, read and verified alone."""

from collections.abc import Iterator
from typing import Self

import numpy as np

from kernels.digest import digest
from storage.corpus.manifest import Manifest, read_manifest
from storage.corpus.mixture import Located
from storage.errors import UsageError
from storage.store import Store
from storage.windows import WindowReader


class Stream:
    """Windows of a prepared mix that lies in `store` under the key prefix `base` ("" or "mix/")."""

    def __init__(self, manifest: Manifest, store: Store, base: str = "") -> None:
        self.manifest, self.store, self.base = manifest, store, base
        self.mixture = manifest.mixture
        sources = range(len(manifest.mix.sources))
        self._train = [WindowReader(manifest, store, base, source, "train") for source in sources]
        self._held_out = [WindowReader(manifest, store, base, source, "held_out") for source in sources]

    @classmethod
    def open(cls, store: Store, base: str = "", root: str | None = None, digest: str | None = None) -> Self:
        """The stream of the mix in `store`; InputFault if its mix root is not `root`, or the digest of its manifest not
        `digest` (where they are given)."""
        return cls(read_manifest(store, base, root, digest), store, base)

    @property
    def window_tokens(self) -> int:
        return self.manifest.mix.window_tokens

    @property
    def dtype(self) -> np.dtype:
        """uint16 or uint32, little-endian: the type in which windows are stored and digested."""
        return np.dtype(self.manifest.mix.dtype)

    def locate(self, first: int, count: int) -> Located:
        """Source, number, pass and position of windows first .. first+count-1; constant time each."""
        if first < 0 or count < 0:
            raise UsageError(f"windows {first} to {first + count} were asked for; the stream begins at 0")
        return self.mixture.locate(np.arange(first, first + count))

    def windows(self, first: int, count: int) -> np.ndarray:
        """uint[count, window_tokens], each verified against its leaf; InputFault names file and window that differ."""
        result = np.empty((count, self.window_tokens), dtype=self.dtype)
        for places, reader, rows in self._by_source(first, count):
            result[places] = reader.read(rows)
        return result

    def rows(self, source: int, part: str, rows: np.ndarray) -> np.ndarray:
        """Windows of a source's part ("train" or "held_out") by their rows, verified: uint[n, window_tokens]."""
        return (self._train if part == "train" else self._held_out)[source].read(rows)

    def leaves(self, first: int, count: int) -> list[bytes]:
        """The windows' 32-byte leaves, without reading the windows."""
        result = [b""] * count
        for places, reader, rows in self._by_source(first, count):
            for place, leaf in zip(places.tolist(), reader.leaves(rows), strict=True):
                result[place] = leaf
        return result

    def batch_digest(self, first: int, count: int) -> str:
        """What a ledger entry says of its windows: BLAKE3("batch", their leaves in order)."""
        return digest(b"".join(self.leaves(first, count)), "batch")

    def held_out(self) -> np.ndarray:
        """All held-out windows, verified, by source and in order: uint[n, window_tokens]."""
        return np.concatenate([reader.read(np.arange(reader.windows.windows)) for reader in self._held_out])

    def check(self) -> None:
        """Read and verify every window of the mix; WindowFault names the first that differs."""
        for reader in self._train + self._held_out:
            reader.check()

    def _by_source(self, first: int, count: int) -> Iterator[tuple[np.ndarray, WindowReader, np.ndarray]]:
        located = self.locate(first, count)
        for source in np.unique(located.source).tolist():
            places = np.nonzero(located.source == source)[0]
            yield places, self._train[source], located.position[places]
