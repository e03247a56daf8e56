"""Which documents are in which windows of a source: an index that reads, of its shards' files, those it is asked about.

`storage/corpus/index_file.py` says what is in such a file. A document's number and tokens stand in each shard that it
touches, so one file answers for its windows, and no question but one for names or for all needs the whole index.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from storage.corpus.index_file import Span, index_key, read_shard, shard_index
from storage.corpus.manifest import Windows
from storage.errors import InputFault, MissingObject
from storage.stream import Stream

__all__ = ["Document", "Index", "index_key", "shard_index"]

HELD = 4  # shards of a source whose documents stay in memory

_FIELDS = "docs.number, docs.file, docs.member, docs.position, docs.first_token, docs.tokens"
_IN_ROWS = f"""
select asked.row, {_FIELDS} from asked join docs on asked.row between docs.first_window and docs.last_window
order by asked.row, docs.first_token
"""
_AT_TOKENS = f"""
select count(*), min(asked.token), {_FIELDS} from asked asof join docs on asked.token >= docs.first_token
group by {_FIELDS} order by docs.number
"""
_NAMED = f"select {_FIELDS} from docs where contains(file, ?) or contains(member, ?) order by number"
_NUMBERED = f"select {_FIELDS} from docs where number = ?"


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

    @property
    def end(self) -> int:
        """The token after its last."""
        return self.first_token + self.tokens


class Index:
    """The documents of one source. Each file that is read is verified by its digest, and held to the manifest's counts
    and to the files of the neighbouring shards, as far as these were read: InputFault if they contradict each other,
    MissingObject if one is not there."""

    def __init__(self, stream: Stream, source: int) -> None:
        self._stream, self._entry = stream, stream.manifest.mix.sources[source]
        self.source = self._entry.name
        self._held: dict[tuple[str, int], pa.Table] = {}  # the oldest first
        self._edges: dict[tuple[str, int], tuple[Document, Document]] = {}  # of every shard that was read
        self._connection = duckdb.connect(config={"threads": 1})  # a shard is too little work to be divided

    def in_rows(self, part: str, rows: Iterable[int]) -> dict[int, list[Document]]:
        """The documents of which these windows of a part hold any token, in token order, by window."""
        found: dict[int, list[Document]] = {row: [] for row in rows}
        for shard, mine in self._by_shard(part, np.array(list(found), np.int64), 1):
            for row, *fields in self._ask(part, shard, _IN_ROWS, asked=pa.table({"row": mine})):
                found[row].append(Document(self.source, part, *fields))
        return found

    def at_tokens(self, part: str, tokens: np.ndarray) -> list[tuple[Document, int, int]]:
        """(document, how many, the first) for each document in which any of these tokens of the part's stream lie."""
        found: dict[int, tuple[Document, int, int]] = {}
        for shard, mine in self._by_shard(part, tokens, self._stream.window_tokens):
            for count, first, *fields in self._ask(part, shard, _AT_TOKENS, asked=pa.table({"token": mine})):
                document = Document(self.source, part, *fields)
                _, before, earliest = found.get(document.number, (document, 0, first))
                found[document.number] = document, before + count, min(first, earliest)
        return list(found.values())

    def named(self, part: str, text: str) -> Iterator[Document]:
        """The documents of a part whose file or member has `text` in its name, in order, shard by shard."""
        for shard in range(self.shards(part)):
            for fields in self._ask(part, shard, _NAMED, [text, text]):
                document = Document(self.source, part, *fields)
                if document.first_token >= self._span(part, shard).start:  # else it stood in the shard before too
                    yield document

    def document(self, part: str, number: int) -> Document | None:
        """The document with this number, if there is one: a search over shards, the first try where it should be."""
        low, high = 0, self.shards(part) - 1
        below, above = 0, self._windows(part).documents - 1  # the numbers that are left for shards low to high
        if not below <= number <= above:
            return None
        halve = False
        while True:  # shards that meet leave no number out, so one of low to high has it
            shard = (low + high) // 2 if halve else low + (high - low) * (number - below) // max(1, above - below)
            first, last = self._edge(part, shard)
            if first.number <= number <= last.number:
                (fields,) = self._ask(part, shard, _NUMBERED, [number])
                return Document(self.source, part, *fields)
            if number < first.number:
                high, above = shard - 1, first.number - 1
            else:
                low, below = shard + 1, last.number + 1
            halve = not halve  # so that no order of long and short documents makes the search long

    def shards(self, part: str) -> int:
        """How many shards a part has."""
        return len(self._windows(part).shards)

    def key_of(self, part: str, row: int) -> str:
        """The file that has the documents of a window."""
        ((shard, _),) = self._by_shard(part, np.array([row]), 1)
        return index_key(self.source, part, shard)

    def beginning(self, part: str, shard: int) -> pa.Table:
        """The documents that begin in a shard (COLUMNS; names as dictionaries): over all shards, each document once."""
        table = self._table(part, shard)
        return table.slice(int(table["first_token"][0].as_py() < self._span(part, shard).start))

    def _windows(self, part: str) -> Windows:
        windows: Windows = getattr(self._entry, part)
        return windows

    def _span(self, part: str, shard: int) -> Span:
        windows, width = self._windows(part), self._stream.window_tokens
        size = self._stream.manifest.mix.spec.shard_windows * width
        end = windows.tokens if shard == self.shards(part) - 1 else (shard + 1) * size
        return Span(shard * size, end, width, windows)

    def _by_shard(self, part: str, places: np.ndarray, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """(shard, those in it) of rows, or of tokens of windows of `width`; what is in the tail is with the last."""
        size = self._stream.manifest.mix.spec.shard_windows * width
        shards = np.minimum(places // size, self.shards(part) - 1)
        for shard in np.unique(shards).tolist():
            yield shard, places[shards == shard]

    def _ask(
        self, part: str, shard: int, query: str, values: Iterable[object] = (), asked: pa.Table | None = None
    ) -> list[tuple[Any, ...]]:
        self._connection.register("docs", self._table(part, shard))
        if asked is not None:
            self._connection.register("asked", asked)
        return self._connection.execute(query, list(values)).fetchall()

    def _edge(self, part: str, shard: int) -> tuple[Document, Document]:
        if (part, shard) not in self._edges:
            self._table(part, shard)
        return self._edges[part, shard]

    def _table(self, part: str, shard: int) -> pa.Table:
        """The documents of one shard."""
        table = self._held.pop((part, shard), None)
        if table is None:
            table = self._read(part, shard)
            first, last = (Document(self.source, part, *_row(table, place)) for place in (0, -1))
            self._meet(part, shard, first, last)
            self._edges[part, shard] = first, last
        self._held[part, shard] = table
        if len(self._held) > HELD:
            del self._held[next(iter(self._held))]
        return table

    def _read(self, part: str, shard: int) -> pa.Table:
        key = index_key(self.source, part, shard)
        file = self._stream.manifest.files.get(key)
        if file is None:
            raise MissingObject(
                f"{self._stream.store.uri}: the manifest does not list {key}",
                cause="a mix that was prepared before its index had a file for each shard, or one without an index",
                next_step="prepare the mix again in an empty folder",
            )
        data = self._stream.store.read(self._stream.base + key, file.digest)
        try:
            return read_shard(data, self._span(part, shard))
        except ValueError as error:
            raise self._fault(part, shard, str(error)) from None

    def _meet(self, part: str, shard: int, first: Document, last: Document) -> None:
        """Neighbours go on where this shard ends: with the same document, or the next one."""
        before, after = (self._edges.get((part, other)) for other in (shard - 1, shard + 1))
        for left, right in ((before and before[1], first), (last, after and after[0])):
            if left and right and left != right and (left.number + 1, left.end) != (right.number, right.first_token):
                raise self._fault(
                    part,
                    shard,
                    f"contradicts a shard beside it: document {left.number}, from token {left.first_token} to "
                    f"{left.end - 1}, and then {right.number} from token {right.first_token}",
                )

    def _fault(self, part: str, shard: int, how: str) -> InputFault:
        return InputFault(
            f"{self._stream.store.uri}: {self._stream.base}{index_key(self.source, part, shard)} {how}",
            cause="an index of another mix, or one that was changed",
            next_step="fetch it again from where the mix was published",
        )


def _row(table: pa.Table, place: int) -> list[Any]:
    return [table[name][place].as_py() for name in ("number", "file", "member", "position", "first_token", "tokens")]
