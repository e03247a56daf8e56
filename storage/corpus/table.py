"""Documents out of the rows of Parquet and JSON lines files.

Every row has its position in the file, and is a text or has the first of these reasons to be skipped: undecodable or
malformed (no JSON object, a value of another type than declared), filtered, licence, language, empty (the text is
missing or null) or malformed (it is no string). JSON rows end at line feeds; a blank one is empty. Only the columns
that decide are read.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.corpus.row import MAX_ARCHIVE, MAX_MEMBER, Row, check_size, nested
from storage.corpus.spec import Allowed, Filtered, Rows
from storage.corpus.where import Filter, columns_of, fits, typed
from storage.errors import InputFault, UsageError

BATCH = 4096  # rows that are filtered together
PIECE = 4 << 20  # bytes that are unpacked at a time

Records = list[dict[str, Any] | str]  # a row's columns, or the reason why it has none


def table_rows(name: str, data: bytes, how: Rows) -> Iterator[Row]:
    """All rows of the file `name` with content `data`. InputFault if it is damaged, UsageError if a filter fits not."""
    for position, record in enumerate(chosen(name, data, how, how.text)):
        if isinstance(record, str):
            yield Row("", position, None, record)
            continue
        text = record.get(how.text)
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError:
                yield Row("", position, None, "undecodable")
                continue
        if isinstance(text, str):
            yield Row("", position, text)
        else:
            yield Row("", position, None, "empty" if text is None else "malformed")


def chosen(name: str, data: bytes, how: Filtered, *columns: str) -> Iterator[dict[str, Any] | str]:
    """For each row of the file these columns of it, or the reason why it is skipped. Texts of Parquet come as bytes."""
    for records in _parquet(name, data, how, columns) if name.endswith(".parquet") else _json(name, data, how):
        for record in records:
            yield record if isinstance(record, str) else _unwanted(record, how) or record


def _unwanted(record: dict[str, Any], how: Filtered) -> str:
    for reason, allowed in (("licence", how.licences), ("language", how.languages)):
        if allowed is not None and not _among(record, allowed):
            return reason
    return ""


def _among(record: dict[str, Any], allowed: Allowed) -> bool:
    value: Any = record
    for key in allowed.column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(one, str) and one in allowed.values for one in values)


def _json(name: str, data: bytes, how: Filtered) -> Iterator[Records]:
    if how.where is not None and not how.columns:
        raise UsageError(
            f"{name}: the filter {how.where!r} reads columns that have no type",
            cause="unlike a Parquet file's, the columns of JSON rows have no types of their own",
            next_step=f"add columns: {{{', '.join(f'{c}: BIGINT' for c in columns_of(how.where))}}} beside where",
        )
    holds = None if how.where is None else Filter(name, how.where, how.columns)
    every = _lines(name, data)
    while lines := list(islice(every, BATCH)):
        records = [_object(line, how) for line in lines]
        yield records if holds is None else _filtered(records, holds, how)


def _object(line: bytes, how: Filtered) -> dict[str, Any] | str:
    try:
        text = line.decode()
        record = None if nested(line) else json.loads(text)
    except UnicodeDecodeError:
        return "undecodable"
    except ValueError:
        return "malformed" if line.strip() else "empty"
    if not isinstance(record, dict) or not all(fits(record.get(c), kind) for c, kind in how.columns.items()):
        return "malformed"
    return record


def _filtered(records: Records, holds: Filter, how: Filtered) -> Records:
    kept = iter(holds(typed([record for record in records if isinstance(record, dict)], how.columns)))
    return [record if isinstance(record, str) or next(kept) else "filtered" for record in records]


def _lines(name: str, data: bytes) -> Iterator[bytes]:
    """The lines of the file, unpacked piece by piece; a last one without a line end is one too."""
    start, size = b"", 0
    for piece in _pieces(name, data):
        check_size(name, size := size + len(piece), MAX_ARCHIVE)
        *lines, start = (start + piece).split(b"\n")
        check_size(f"a line of {name}", len(start), MAX_MEMBER)
        yield from lines
    if start:
        yield start


def _pieces(name: str, data: bytes) -> Iterator[bytes]:
    try:
        if name.endswith(".jsonl.gz"):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                yield from iter(lambda: file.read(PIECE), b"")
        elif name.endswith(".jsonl.zst"):
            with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
                yield from iter(lambda: stream.read(PIECE), b"")
        elif name.endswith(".jsonl"):
            yield from (data[at : at + PIECE] for at in range(0, len(data), PIECE))
        else:
            raise InputFault(
                f"{name}: rows are read from .parquet, .jsonl, .jsonl.gz and .jsonl.zst files only",
                next_step="choose other files in the recipe, or extract: {kind: text} for plain text",
            )
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise InputFault(
            f"{name} cannot be unpacked: {error}", cause="pinned as it is, but cut off, damaged or not compressed so"
        ) from error


def _parquet(name: str, data: bytes, how: Filtered, columns: tuple[str, ...]) -> Iterator[Records]:
    if how.columns:
        raise UsageError(f"{name}: a Parquet file has its own types", next_step="leave out columns beside where")
    by = (how.licences, how.languages)
    shown = [*columns, *(allowed.column.partition(".")[0] for allowed in by if allowed is not None)]
    read = columns_of(how.where) if how.where is not None else ()
    holds = None if how.where is None else Filter(name, how.where, {})
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        if missing := sorted({*shown, *read} - set(file.schema_arrow.names)):
            raise UsageError(
                f"{name} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}",
                next_step="correct the column's name in the recipe",
            )
        for batch in file.iter_batches(BATCH, columns=sorted({*shown, *read})):
            records = _undecoded(batch.select(sorted(set(shown))), columns).to_pylist()
            if holds is not None:
                kept = holds(pa.Table.from_batches([batch.select(read)]))
                records = [record if keep else "filtered" for record, keep in zip(records, kept, strict=True)]
            yield records
    except (pa.ArrowException, OSError) as error:
        raise InputFault(f"{name} is not a Parquet file that can be read: {error}") from error


def _undecoded(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    """The batch with these texts as bytes, of which one that is not UTF-8 must not make all unreadable."""
    for column in columns:
        at = batch.schema.get_field_index(column)
        kind = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(batch.schema.field(at).type)
        if kind is not None:
            batch = batch.set_column(at, column, batch.column(at).cast(kind))
    return batch
