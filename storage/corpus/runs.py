"""Stage "encode": texts of one source become a sorted run of its documents, each at its place of the global order.

    runs/<source>/<number>    place, file, member, position, row, held, ids: ascending by place

This is the first half of an external sort. A run takes as much text as the sort's budget allows, so that more memory
gives fewer runs; the second half (shards.py) takes from every run the stretch of places that a shard needs. Places are
a function of (seed, source, canonical number), so that neither budget nor workers decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.corpus.documents import places
from storage.corpus.numbering import Numbered, lengths
from storage.corpus.parts import Parts
from storage.corpus.read import DIGEST, taken
from storage.corpus.tokens import TokensPart

MOST = 1 << 30  # bytes of text: Arrow joins no texts of 2 GiB and more
SHARE = 4  # of the budget for a run's text: its ids are held twice; beside it the encoder takes about 100 MB
TOGETHER = 2048  # documents that are put in order at a time: to take lists, Arrow needs 8 bytes for each of their items
LEAST = 4 << 20  # bytes of text: below that a run is not worth its files


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop-1 of a file's texts; `dropped` (of these rows) are left out, the first kept is `first`."""

    part: str
    file: int
    start: int
    stop: int
    dropped: np.ndarray
    first: int

    @property
    def rows(self) -> np.ndarray:
        """The rows that are kept, int64, ascending."""
        return np.setdiff1d(np.arange(self.start, self.stop), self.dropped, assume_unique=True)


@dataclass(frozen=True)
class Encode:
    """A sorted run of a source with `count` documents in all."""

    parts: Parts
    seed: int
    source: str
    number: int
    count: int
    pieces: tuple[Piece, ...]
    tokens: TokensPart
    size: int

    @property
    def name(self) -> str:
        return f"runs/{self.source}/{self.number:06d}"

    @property
    def _made_from(self) -> str:
        spans = ",".join(f"{piece.file}:{piece.start}-{piece.stop}" for piece in self.pieces)
        return f"{self.tokens.digest} {spans}"

    def finished(self) -> bool:
        return self.parts.finished(self.name, self._made_from)

    def __call__(self) -> None:
        """Raises what `Tokens.encode` does."""
        found = [(piece, piece.rows, self.parts.table(piece.part)) for piece in self.pieces]
        tables = [_rows(table, piece) for piece, _, table in found]
        numbers = np.concatenate([piece.first + np.arange(len(rows)) for piece, rows, _ in found])
        place = places(self.seed, self.source, self.count, numbers)
        encoded = self.tokens.open().encode(_texts(tables))
        ids = pa.LargeListArray.from_arrays(np.concatenate([[0], encoded.ends]), pa.array(encoded.ids))
        texts = pa.concat_tables(tables)
        columns = {
            "place": pa.array(place),
            "file": pa.array(np.repeat([p.file for p, _, _ in found], [len(rows) for _, rows, _ in found]), pa.int32()),
            "member": texts["member"].cast(pa.large_string()).combine_chunks(),  # of many small files: over 2 GiB
            "position": texts["position"].combine_chunks(),
            "row": pa.array(np.concatenate([rows for _, rows, _ in found])),
            "held": texts["held"].combine_chunks().cast(DIGEST),
            "ids": ids,
        }
        ordered = in_order(pa.table(columns), np.argsort(place))
        self.parts.write(self.name, {"documents": len(place)}, ordered, self._made_from)


def in_order(table: pa.Table, order: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Rows `order` (int64) of a table whose columns have one chunk each, some documents at a time."""
    for start in range(0, len(order), TOGETHER):
        yield from table.take(pa.array(order[start : start + TOGETHER])).to_batches()


def _rows(table: pa.Table, piece: Piece) -> pa.Table:
    part = table.slice(piece.start, piece.stop - piece.start)
    return taken(part, piece.rows - piece.start) if len(piece.dropped) else part


def _texts(tables: list[pa.Table]) -> Iterator[str]:
    for table in tables:
        for chunk in table["text"].chunks:
            yield from chunk.to_pylist()


def runs(parts: Parts, seed: int, source: Numbered, tokens: TokensPart, budget: int, workers: int) -> list[Encode]:
    """The runs of a source: at most `budget` / SHARE bytes of text each, if no text is longer, and enough for all
    workers."""
    most = max(1, min(budget // SHARE, MOST, max(LEAST, source.text_bytes // (4 * workers))))
    found: list[Encode] = []
    pieces: list[Piece] = []
    size = 0
    for piece, length in _pieces(parts, source, most):
        if pieces and size + length > most:
            found.append(Encode(parts, seed, source.source, len(found), source.count, tuple(pieces), tokens, size))
            pieces, size = [], 0
        pieces.append(piece)
        size += length
    if pieces:
        found.append(Encode(parts, seed, source.source, len(found), source.count, tuple(pieces), tokens, size))
    return found


def _pieces(parts: Parts, source: Numbered, most: int) -> Iterator[tuple[Piece, int]]:
    """(piece, bytes of its texts): each file's rows, cut where `most` bytes would be passed."""
    for number, file in enumerate(source.files):
        ends = np.cumsum(lengths(parts, file))
        start = 0
        while start < file.rows:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
            low, high = np.searchsorted(file.dropped, [start, stop]).tolist()
            if high - low < stop - start:
                piece = Piece(file.part, number, start, stop, file.dropped[low:high], file.first + start - low)
                yield piece, int(ends[stop - 1]) - before
            start = stop
