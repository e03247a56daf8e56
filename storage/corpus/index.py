"""Which documents are in which windows: a Parquet file per source, and an index that is opened to answer it.

    docs/<source>.parquet    part, file, member, position, first_token, tokens, first_window, last_window

One row for each document, in the order of its part's token stream. A document in the tail has a last_window that does
not exist. `tokens` counts the end-of-text token.
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.corpus.manifest import Windows
from storage.errors import InputFault
from storage.stream import Stream
from storage.windows import PARTS

_FIELDS = "docs.part, docs.number, docs.file, docs.member, docs.position, docs.first_token, docs.tokens"
_IN_ROWS = f"""
select asked.row, {_FIELDS} from asked
join docs on docs.part = ? and asked.row between docs.first_window and docs.last_window
order by asked.row, docs.first_token
"""
_AT_TOKENS = f"""
select count(*), min(asked.token), {_FIELDS} from asked
asof join (select * from docs where part = ?) as docs on asked.token >= docs.first_token
group by {_FIELDS} order by docs.number
"""
_OTHER = """
select file, member, position, one.part, one.tokens, other.part, other.tokens
from one full join other using (file, member, position)
where one.part is null or other.part is null or (? and (one.tokens <> other.tokens or one.part <> other.part))
order by one.part is not null and other.part is not null and one.tokens = other.tokens, file, member, position limit 1
"""
_NAMED = f"select {_FIELDS} from docs where part = ? and (contains(file, ?) or contains(member, ?)) order by number"


def index_key(source: str, part: str, shard: int) -> str:
    return f"docs/{source}/{part}/{shard:05d}.parquet"


def shard_index(columns: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(columns, sink, compression="zstd")
    return sink.getvalue()


@dataclass(frozen=True)
class Document:
    """A document's address, and its tokens in its part's stream: `tokens` from `first_token` on, end-of-text included.

    number: its place among the documents of its part.
    """

    source: str
    part: str
    number: int
    file: str
    member: str
    position: int
    first_token: int
    tokens: int

    @property
    def id(self) -> str:
        """What names it in questions: <source>/<part>/<number>."""
        return f"{self.source}/{self.part}/{self.number}"

    @property
    def address(self) -> str:
        """Where its text was taken from: file, member, position."""
        return " ".join(filter(None, (self.file, self.member, str(self.position))))


def first_other_document(one: "Index", other: "Index", tokens: bool) -> str:
    """In words, the first document in canonical order that only one has or, where `tokens` says so, that has another
    number of tokens; then the first that moved between training and held out. "" if there is none."""
    with duckdb.connect() as connection:
        for name, index in (("one", one), ("other", other)):
            connection.register(name, index.table)
        found = connection.execute(_OTHER, [tokens]).fetchall()
    if not found:
        return ""
    file, member, position, *each = found[0]
    said = [f"{count} tokens ({part})" if part else "absent" for part, count in zip(each[::2], each[1::2], strict=True)]
    return f"file {file}, {member} document {position}: {said[0]} and {said[1]}".replace(",  ", ", ")


class Index:
    """The documents of one source. Opening it reads the whole file, verified, and holds it to the manifest's counts."""

    def __init__(self, stream: Stream, source: int) -> None:
        entry = stream.manifest.mix.sources[source]
        self.source, self._key = entry.name, stream.base + index_key(entry.name)
        self._uri = stream.store.uri
        file = stream.manifest.files.get(index_key(entry.name))
        if file is None:
            raise InputFault(f"{self._uri}: the manifest does not list {index_key(entry.name)}")
        table = self._table(stream.store.read(self._key, file.digest))
        numbers = np.full(len(table), -1)
        for part in PARTS:
            mine = pc.equal(table["part"], part)
            self._check(table.filter(mine), part, getattr(entry, part))
            numbers[mine.to_numpy()] = np.arange(getattr(entry, part).documents)
        if (numbers < 0).any():
            raise InputFault(f"{self._uri}: {self._key} has documents in other parts than {' and '.join(PARTS)}")
        self.table = table.append_column("number", pa.array(numbers))
        self._connection = duckdb.connect()
        self._connection.register("docs", self.table)

    def in_rows(self, part: str, rows: Iterable[int]) -> dict[int, list[Document]]:
        """The documents of which these windows of a part hold any token, in token order, by window."""
        found: dict[int, list[Document]] = {row: [] for row in rows}
        self._connection.register("asked", pa.table({"row": pa.array(list(found), pa.int64())}))
        for row, *fields in self._connection.execute(_IN_ROWS, [part]).fetchall():
            found[row].append(Document(self.source, *fields))
        return found

    def at_tokens(self, part: str, tokens: np.ndarray) -> list[tuple[Document, int, int]]:
        """(document, how many, the first) for each document in which any of these tokens of the part's stream lie."""
        self._connection.register("asked", pa.table({"token": pa.array(tokens, pa.int64())}))
        found = self._connection.execute(_AT_TOKENS, [part]).fetchall()
        return [(Document(self.source, *fields), count, first) for count, first, *fields in found]

    def named(self, part: str, text: str) -> list[Document]:
        """The documents of a part whose file or member has `text` in its name."""
        found = self._connection.execute(_NAMED, [part, text, text]).fetchall()
        return [Document(self.source, *fields) for fields in found]

    def document(self, part: str, number: int) -> Document | None:
        """The document with this number, if there is one."""
        query = f"select {_FIELDS} from docs where part = ? and number = ?"
        found = self._connection.execute(query, [part, number]).fetchall()
        return Document(self.source, *found[0]) if found else None

    def _table(self, data: bytes) -> pa.Table:
        names = {"part": pa.string(), "file": pa.string(), "member": pa.string()}
        numbers = ("position", "first_token", "tokens", "first_window", "last_window")
        schema = pa.schema(names | dict.fromkeys(numbers, pa.int64()))
        try:
            table = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise InputFault(f"{self._uri}: {self._key} is no Parquet file: {str(error)[:300]}") from None
        if not table.schema.equals(schema) or any(column.null_count for column in table.columns):
            found = ", ".join(f"{field.name} {field.type}" for field in table.schema)
            raise InputFault(f"{self._uri}: {self._key} has not an index's columns, or gaps in them: {found[:300]}")
        return table

    def _check(self, table: pa.Table, part: str, windows: Windows) -> None:
        """The documents lie end to end, and are as many and as long as the mix root says."""
        first, tokens = (table[name].to_numpy() for name in ("first_token", "tokens"))
        found = len(tokens), int(tokens.sum())
        wrong = (tokens < 1) | (tokens > windows.tokens) | (first != np.cumsum(tokens) - tokens)
        if found != (windows.documents, windows.tokens) or wrong.any():
            raise InputFault(
                f"{self._uri}: {self._key} has {found[0]} documents of {found[1]} tokens in {part}, end to end; "
                f"the mix has {windows.documents} of {windows.tokens}",
                cause="an index of another mix, or one that was changed",
                next_step="fetch it again from where the mix was published",
            )
