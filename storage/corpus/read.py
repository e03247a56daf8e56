"""Stage "read": the documents of one pinned file, and what was skipped and why, as a piece of the preparation.

    texts/<source>/<file>    text, member, position, same: BLAKE3 of the text, held: keyed BLAKE3 of the normalised text

Rows lie in the file's canonical order. A file is held in memory whole while it is read, since the very bytes that were
verified are what is read; its texts leave it batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from storage.corpus.documents import held_out_key, held_out_name
from storage.corpus.extract import rows
from storage.corpus.fetch import read_pinned
from storage.corpus.parts import Parts
from storage.corpus.spec import PinnedFile

BATCH = 8 << 20  # bytes of text that leave together
DIGEST = pa.binary(32)
SCHEMA = pa.schema(
    [("text", pa.string()), ("member", pa.string()), ("position", pa.int64()), ("same", DIGEST), ("held", DIGEST)]
)


@dataclass(frozen=True)
class Read:
    """The texts of file `number` of a source."""

    parts: Parts
    seed: int
    source: str
    number: int
    pin: PinnedFile
    cache: Path

    @property
    def name(self) -> str:
        return texts_name(self.source, self.number)

    @property
    def size(self) -> int:
        return self.pin.size

    def finished(self) -> bool:
        return self.parts.finished(self.name)

    def __call__(self) -> None:
        """Raises what `read_pinned` and the extractors do."""
        about: dict[str, Any] = {"documents": 0, "bytes": 0, "skipped": {}}
        self.parts.write(self.name, about, self._batches(about))

    def _batches(self, about: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        secret, batch = held_out_key(self.seed), _Batch()
        for row in rows(self.pin.name, read_pinned(self.pin, self.cache), self.pin.extract, self.cache):
            if row.text is None:
                about["skipped"][row.reason] = about["skipped"].get(row.reason, 0) + 1
                continue
            data = row.text.encode()
            batch.add(row.text, row.member, row.position, blake3(data).digest(), held_out_name(secret, row.text))
            batch.size += len(data)
            about["documents"] += 1
            about["bytes"] += len(data)
            if batch.size >= BATCH:
                yield batch.whole()
                batch = _Batch()
        yield batch.whole()


@dataclass
class _Batch:
    columns: list[list[Any]] = field(default_factory=lambda: [[] for _ in SCHEMA])
    size: int = 0

    def add(self, *values: Any) -> None:
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def whole(self) -> pa.RecordBatch:
        arrays = [pa.array(column, kind.type) for column, kind in zip(self.columns, SCHEMA, strict=True)]
        return pa.record_batch(arrays, schema=SCHEMA)


def taken(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """These rows (int64, ascending) of a table, batch by batch: a `take` of all would first join a file's texts into
    one array, which holds no more than 2 GiB."""
    found, start = [], 0
    for batch in table.to_batches():
        low, high = np.searchsorted(rows, [start, start + len(batch)]).tolist()
        if low < high:
            found.append(batch.take(pa.array(rows[low:high] - start)))
        start += len(batch)
    return pa.Table.from_batches(found, table.schema)


def texts_name(source: str, number: int) -> str:
    """The piece that has the texts of a source's file."""
    return f"texts/{source}/{number:06d}"
