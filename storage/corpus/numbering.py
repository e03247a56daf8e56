"""Stage "number": a source's documents in canonical order, without those that are dropped as duplicates.

A document's canonical number counts the kept documents of its source: files by name, members by name, rows by
position. Of texts with the same bytes the first stays, by the spec's order of the sources, then by canonical order. It
takes about 50 bytes of memory for each document of the mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.corpus.parts import Parts
from storage.corpus.read import texts_name
from storage.corpus.spec import MixSpec, PinnedFile
from storage.errors import InputFault


@dataclass(frozen=True)
class FileTexts:
    """The documents of one file: the piece that has its texts, how many rows, which of them are dropped (int64,
    ascending), and the canonical number of the first that is kept."""

    part: str
    name: str
    rows: int
    dropped: np.ndarray
    first: int

    @property
    def kept(self) -> np.ndarray:
        """Rows, int64, ascending."""
        return np.setdiff1d(np.arange(self.rows), self.dropped, assume_unique=True)

    @property
    def count(self) -> int:
        return self.rows - len(self.dropped)


@dataclass(frozen=True)
class Numbered:
    """All documents of a source; skipped: rows that are no documents of it, by reason."""

    source: str
    files: tuple[FileTexts, ...]
    text_bytes: int
    skipped: dict[str, int]

    @property
    def count(self) -> int:
        return sum(file.count for file in self.files)


def number(parts: Parts, spec: MixSpec, pins: dict[str, list[PinnedFile]]) -> list[Numbered]:
    """The documents of every source whose files were read; InputFault if a source has none."""
    names = [texts_name(source, i) for source, files in pins.items() for i in range(len(files))]
    dropped = _duplicates(parts, names) if spec.duplicates == "drop" else {}
    return [_of_source(parts, source, files, dropped) for source, files in pins.items()]


def lengths(parts: Parts, file: FileTexts) -> np.ndarray:
    """Bytes of each of a file's texts, int64[rows]; those of dropped ones are not counted."""
    found = pc.binary_length(parts.table(file.part)["text"]).to_numpy().astype(np.int64)
    found[file.dropped] = 0
    return found


def digests(column: pa.ChunkedArray) -> np.ndarray:
    """A column of 32-byte digests as uint64[n, 4], big-endian words: rows compare as the digests do."""
    pieces = [chunk.buffers()[1].slice(32 * chunk.offset, 32 * len(chunk)) for chunk in column.chunks if len(chunk)]
    words = np.frombuffer(b"".join(memoryview(piece) for piece in pieces), ">u8")
    return words.reshape(-1, 4).astype(np.uint64)


def _of_source(parts: Parts, source: str, pins: list[PinnedFile], dropped: dict[str, np.ndarray]) -> Numbered:
    files: list[FileTexts] = []
    skipped: dict[str, int] = {}
    size = first = 0
    for index, pin in enumerate(pins):
        part = texts_name(source, index)
        about = parts.about(part)
        gone = dropped.get(part, np.empty(0, np.int64))
        file = FileTexts(part, pin.name, about["documents"], gone, first)
        files.append(file)
        first += file.count
        size += int(lengths(parts, file).sum()) if len(gone) else about["bytes"]
        for reason, count in [*about["skipped"].items(), *([("duplicate", len(gone))] if len(gone) else [])]:
            skipped[reason] = skipped.get(reason, 0) + count
    if not first:
        raise InputFault(
            f"source {source} has no documents; skipped rows: {skipped or 'none'}",
            cause="the files are empty, the globs, the column or the filter select nothing, or sources before it have "
            "the same texts",
            next_step=f"look at the files of {source} and correct the recipe",
        )
    return Numbered(source, tuple(files), size, skipped)


def _duplicates(parts: Parts, names: list[str]) -> dict[str, np.ndarray]:
    """Rows of each piece of texts whose text came before, in the order of `names`."""
    found = [digests(parts.table(name)["same"]) for name in names]  # a system maps only so many files at a time
    again = _repeated(np.concatenate(found))
    bounds = np.cumsum([0, *(len(of_file) for of_file in found)]).tolist()
    return {
        name: np.nonzero(again[start:stop])[0] for name, start, stop in zip(names, bounds, bounds[1:]) if start < stop
    }


def _repeated(names: np.ndarray) -> np.ndarray:
    """bool[n]: which of uint64[n, 4] digests have come before, at a lower index."""
    order = np.lexsort(names.T[::-1])  # stable: of equal digests the first stays first
    ordered = names[order]
    again = np.zeros(len(names), dtype=bool)
    again[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return again
