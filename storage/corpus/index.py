"""Which documents are in which windows: a Parquet file per source, and the question "what did this step see?".

    docs/<source>.parquet    part, file, member, position, first_token, tokens, first_window, last_window

One row for each document, in the order of its part's token stream. A document in the tail has a last_window that does
not exist. `tokens` counts the end-of-text token.
"""

import io
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.corpus.documents import Documents
from storage.corpus.pack import Packed, Part
from storage.stream import Stream

_SEEN = """
select s.number, docs.file, docs.member, docs.position, docs.tokens
from seen s join docs on docs.part = ? and s.row between docs.first_window and docs.last_window
order by s.number, docs.first_token
"""


def index_key(source: str) -> str:
    return f"docs/{source}.parquet"


def index_file(documents: Documents, packed: Packed) -> bytes:
    """The Parquet file of one source."""
    table = pa.concat_tables([_rows("train", documents, packed.train), _rows("held_out", documents, packed.held_out)])
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _rows(name: str, documents: Documents, part: Part) -> pa.Table:
    starts = np.concatenate([[0], part.ends[:-1]])
    numbers = part.documents.tolist()
    return pa.table(
        {
            "part": pa.array([name] * len(numbers), pa.string()),
            "file": pa.array([documents.files[documents.file[i]] for i in numbers], pa.string()),
            "member": pa.array([documents.member[i] for i in numbers], pa.string()),
            "position": pa.array([documents.position[i] for i in numbers], pa.int64()),
            "first_token": pa.array(starts, pa.int64()),
            "tokens": pa.array(part.ends - starts, pa.int64()),
            "first_window": pa.array(starts // part.window_tokens, pa.int64()),
            "last_window": pa.array((part.ends - 1) // part.window_tokens, pa.int64()),
        }
    )


def documents_seen(stream: Stream, first: int, count: int) -> list[dict[str, Any]]:
    """The documents of which windows first .. first+count-1 hold any token, in the order of windows and tokens.

    Each is {window, source, pass, file, member, position, tokens}: the global window, and the document's address.
    """
    located = stream.locate(first, count)
    result: list[dict[str, Any]] = []
    for source in np.unique(located.source).tolist():
        places = np.nonzero(located.source == source)[0]
        name = stream.manifest.mix.sources[source].name
        for place, document in _query(stream, name, "train", places, located.position[places]):
            seen = {"window": first + place, "source": name, "pass": int(located.passes[place])}
            result.append(seen | document)
    return sorted(result, key=lambda document: int(document["window"]))  # stable: documents stay in token order


def documents_in(stream: Stream, source: str, part: str, row: int) -> list[dict[str, Any]]:
    """The documents of one window of a source's part ("train" or "held_out"): {file, member, position, tokens}."""
    return [document for _, document in _query(stream, source, part, np.zeros(1, np.int64), np.array([row]))]


def _query(
    stream: Stream, source: str, part: str, number: np.ndarray, row: np.ndarray
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, document) for each document in window row[i] of the part, where number[i] is the caller's own."""
    key = index_key(source)
    data = stream.store.read(stream.base + key, stream.manifest.files[key].digest)
    with duckdb.connect() as connection:
        connection.register("docs", pq.read_table(pa.BufferReader(data)))
        connection.register("seen", pa.table({"number": number, "row": row}))
        for found, *values in connection.execute(_SEEN, [part]).fetchall():
            yield found, dict(zip(("file", "member", "position", "tokens"), values, strict=True))
