"""The first document in which two mixes of one recipe differ, from their indexes, shard by shard.

    1. for each file, sums over its documents' hashes: no order matters, and documents of equal shards cancel out
    2. of the first file whose sums differ, the documents, joined by member and position

So of a whole source only sums are held, and of one file its documents.
"""

from collections import defaultdict
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from storage.corpus.index import Index, index_key
from storage.stream import Stream
from storage.windows import PARTS

_SUMS = """
select file, sum(hash(member, position)), sum(hash(member, position, tokens)), sum(hash(member, position, tokens, ?))
from docs group by file
"""
_OTHER = """
select member, position, one.part, one.tokens, other.part, other.tokens
from one full join other using (member, position)
where one.part is null or other.part is null or (? and (one.tokens <> other.tokens or one.part <> other.part))
order by one.part is not null and other.part is not null and one.tokens = other.tokens, member, position limit 1
"""
_OF_FILE = pa.schema({"member": pa.string(), "position": pa.int64(), "tokens": pa.int64(), "part": pa.string()})


def first_other_document(one: Stream, other: Stream, source: int, tokens: bool) -> str:
    """In words, the first document in canonical order that only one has or, where `tokens` says so, that has another
    number of tokens; then the first that moved between training and held out. "" if there is none.

    Raises MissingObject if an index is not there.
    """
    files, others = one.manifest.files, other.manifest.files
    alike = {key for key in files.keys() & others.keys() if files[key].digest == others[key].digest}
    sides = [_Side(Index(stream, source), alike) for stream in (one, other)]
    balance: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for side, sign in zip(sides, (1, -1), strict=True):
        for file, *sums in side.sums():
            balance[file] = [a + sign * b for a, b in zip(balance[file], sums, strict=True)]
    for what in (1, 2) if tokens else (0,):
        if differ := [file for file, sums in balance.items() if sums[what]]:
            return _first(sides, min(differ), tokens)
    return ""


def _first(sides: list["_Side"], file: str, tokens: bool) -> str:
    """The first document of a file in which they differ."""
    with duckdb.connect() as connection:
        for name, side in zip(("one", "other"), sides, strict=True):
            connection.register(name, side.of_file(file))
        ((member, position, *each),) = connection.execute(_OTHER, [tokens]).fetchall()
    said = [f"{count} tokens ({part})" if part else "absent" for part, count in zip(each[::2], each[1::2], strict=True)]
    return f"file {file}, {f'{member} ' if member else ''}document {position}: {said[0]} and {said[1]}"


class _Side:
    """The documents of a source in one of the mixes, but for the shards whose index is the same in the other."""

    def __init__(self, index: Index, alike: set[str]) -> None:
        self._index, self._alike = index, alike

    def sums(self) -> Iterator[tuple[str, int, int, int]]:
        """For each file of each shard: (file, of its addresses, with their tokens, with their parts too)."""
        with duckdb.connect() as connection:
            for part, table in self._shards():
                connection.register("docs", table)
                yield from connection.execute(_SUMS, [part]).fetchall()

    def of_file(self, file: str) -> pa.Table:
        """member, position, tokens, part of a file's documents."""
        kept = [_OF_FILE.empty_table()]
        for part, table in self._shards():
            mine = table.filter(pc.equal(table["file"], file)).select(_OF_FILE.names[:-1])
            kept.append(mine.append_column("part", pa.array([part] * len(mine), pa.string())).cast(_OF_FILE))
        return pa.concat_tables(kept)

    def _shards(self) -> Iterator[tuple[str, pa.Table]]:
        for part in PARTS:
            for shard in range(self._index.shards(part)):
                if index_key(self._index.source, part, shard) not in self._alike:
                    yield part, self._index.beginning(part, shard)
