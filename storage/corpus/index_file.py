"""The document index of one shard: a Parquet file of the documents in its windows, written, and read as a stranger's.

    docs/<source>/<part>/00000.parquet    number, file, member, position, first_token, tokens, first_window, last_window

One row for each document with any token in the shard's windows, in the order of its part's token stream; the last shard
has those of the tail too, whose last_window does not exist. A document over several shards stands in each of them, with
its own number and tokens. `tokens` counts the end-of-text token.
"""

import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.corpus.manifest import Windows
from storage.objects import MAX_OBJECT

NAMES = ("file", "member")
NUMBERS = ("number", "position", "first_token", "tokens", "first_window", "last_window")
COLUMNS = pa.schema(
    [
        pa.field(name, pa.string() if name in NAMES else pa.int64(), nullable=False)
        for name in (NUMBERS[0], *NAMES, *NUMBERS[1:])
    ]
)
ROW_BYTES = 8 * len(NUMBERS) + 4 * len(NAMES)  # in memory, beside the names themselves


def index_key(source: str, part: str, shard: int) -> str:
    return f"docs/{source}/{part}/{shard:05d}.parquet"


def shard_index(columns: pa.Table) -> bytes:
    """The Parquet file of one shard.

    columns: those of COLUMNS, by their names, int64 and string without nulls; KeyError or ValueError if they are not.
    """
    sink = io.BytesIO()
    pq.write_table(
        columns.select(COLUMNS.names).cast(COLUMNS),
        sink,
        compression="zstd",
        use_dictionary=["file"],
        column_encoding={"member": "PLAIN"} | dict.fromkeys(NUMBERS, "DELTA_BINARY_PACKED"),  # half the size
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue()


@dataclass(frozen=True)
class Span:
    """A shard: tokens `start` to `end` of its part's stream (the last shard's with the tail), and all of the part."""

    start: int
    end: int
    window_tokens: int
    of: Windows


def read_shard(data: bytes, span: Span) -> pa.Table:
    """The rows of a shard's file, `file` and `member` as dictionaries; ValueError unless they can be the span's."""
    table = _parse(data, span)
    number, first, tokens = (table[name].to_numpy() for name in ("number", "first_token", "tokens"))
    ends = first + tokens  # wraps in a hostile file; then some end is not after its beginning
    if not len(ends) or (ends <= first).any() or (first[1:] != ends[:-1]).any():
        raise ValueError("has documents that do not lie end to end")
    said = f"has documents {number[0]} to {number[-1]} at tokens {first[0]} to {ends[-1] - 1}"
    if (number < 0).any() or (np.diff(number) != 1).any():
        raise ValueError(f"{said}, whose numbers do not run on")
    if not (first[0] <= span.start < ends[0] and first[-1] < span.end <= ends[-1]):
        raise ValueError(f"{said}, the shard has tokens {span.start} to {span.end - 1}")
    after = span.of.documents - 1 - int(number[-1]), span.of.tokens - int(ends[-1])
    for documents, left in ((int(number[0]), int(first[0])), after):  # each of them has a token at the least
        if not 0 <= documents <= left or (documents == 0) != (left == 0):
            raise ValueError(f"{said}, the mix has {span.of.documents} of {span.of.tokens} tokens in all")
    for name, at in (("first_window", first), ("last_window", ends - 1)):
        if (table[name].to_numpy() != at // span.window_tokens).any():
            raise ValueError(f"{said}, with a {name} that does not follow from these")
    return table


def _parse(data: bytes, span: Span) -> pa.Table:
    """A table of the right columns; what it takes in memory is bounded by what the file says of itself."""
    try:
        about = pq.read_metadata(pa.BufferReader(data))
        if (found := _kinds(about.schema.to_arrow_schema())) != _kinds(COLUMNS):
            raise ValueError(f"has not an index's columns: {', '.join(map(' '.join, found))[:300]}")
        size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
        size += about.num_rows * ROW_BYTES
        if about.num_rows > span.of.documents or size > MAX_OBJECT:
            raise ValueError(
                f"says that it holds {about.num_rows} documents ({size} bytes), the mix {span.of.documents}"
            )
        # names as dictionaries, since a short file can say a long one a million times
        table = pq.ParquetFile(pa.BufferReader(data), metadata=about, read_dictionary=list(NAMES)).read(
            use_threads=False
        )
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"is no Parquet file: {str(error)[:300]}") from None
    if any(column.null_count for column in table.columns):
        raise ValueError("has gaps in its columns")
    return table


def _kinds(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in schema]
