"""The index of documents, a file for each shard: against an independent slicer; what is read, and what not believed."""

import io
import os
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.corpus.index import HELD, Document, Index, index_key, shard_index
from storage.corpus.index_file import COLUMNS
from storage.corpus.manifest import Manifest, stored
from storage.errors import InputFault, MissingObject
from storage.store import MemoryStore
from storage.stream import Stream
from tests.storage.corpus.mixes import prepared
from tests.storage.counting import Counting
from tests.storage.test_stream import WIDTH, Slicer

Columns = dict[str, list[Any]]
Made = tuple[Stream, Slicer]
TEXTS = 1  # the source whose documents are long


@pytest.fixture(scope="module", params=[8, 1])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The small mix in shards of 8 windows, and of one: then most documents are longer than a shard."""
    folder, store = tmp_path_factory.mktemp("index"), MemoryStore(f"index {request.param}")
    prepared(folder, store, shard_windows=request.param)
    return Stream.open(store), Slicer(folder, store)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    store = MemoryStore("index of eight")
    prepared(tmp_path_factory.mktemp("eight"), store)
    return Stream.open(store)


def counting(stream: Stream) -> tuple[Stream, Counting]:
    counted = Counting(stream.store)
    return Stream(stream.manifest, counted), counted


def parts(slicer: Slicer) -> list[tuple[int, str, list[tuple[Any, int]]]]:
    """(source, part, (address, token) of every token)."""
    both = (("train", slicer.train), ("held_out", slicer.held_out))
    return [(source, part, every[source]) for part, every in both for source in range(len(every))]


def documents(tokens: list[tuple[Any, int]]) -> list[tuple[Any, int, int]]:
    """(address, first token, tokens) of each document: it ends with token 0."""
    ends = [place + 1 for place, (_, token) in enumerate(tokens) if token == 0]
    return [(tokens[start][0], start, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def shown(document: Document) -> tuple[Any, int, int]:
    return (document.file, document.member, document.position), document.first_token, document.tokens


def test_each_file_has_the_documents_of_its_windows(made: Made, tmp_path: Path) -> None:
    """By another reader of Parquet than the one that wrote it."""
    stream, slicer = made
    size = stream.manifest.mix.spec.shard_windows * WIDTH
    over_two = 0
    for source, part, tokens in parts(slicer):
        entry, every = stream.manifest.mix.sources[source], documents(tokens)
        shards = len(getattr(entry, part).shards)
        for shard in range(shards):
            start, end = shard * size, (shard + 1) * size if shard < shards - 1 else len(tokens)
            expected = [
                (number, *address, first, count, first // WIDTH, (first + count - 1) // WIDTH)
                for number, (address, first, count) in enumerate(every)
                if first < end and first + count > start
            ]
            path = tmp_path / "shard.parquet"
            path.write_bytes(stream.store.read(index_key(entry.name, part, shard)))
            found = duckdb.read_parquet(str(path))
            assert found.columns == COLUMNS.names and found.fetchall() == expected
            over_two += sum(count > 2 * size for _, _, _, _, _, count, _, _ in expected)
    assert not [key for key in stream.store.list("docs/") if key not in stream.manifest.files]
    assert over_two or size > WIDTH


def test_windows_tokens_and_numbers_find_their_documents(made: Made) -> None:
    stream, slicer = made
    few = 1 if stream.manifest.mix.spec.shard_windows > 1 else 9  # of very many shards
    for source, part, tokens in parts(slicer):
        index, every = Index(stream, source), documents(tokens)
        assert [shown(document) for document in index.named(part, "")] == every
        count = getattr(stream.manifest.mix.sources[source], part).windows
        for row, held in index.in_rows(part, range(0, count, few)).items():
            addresses = [address for address, _ in tokens[row * WIDTH : (row + 1) * WIDTH]]
            assert [shown(document)[0] for document in held] == list(dict.fromkeys(addresses))
        at = np.arange(0, len(tokens), 5 * few * few)
        expected = [(place, sum(first <= t < first + n for t in at)) for place, (_, first, n) in enumerate(every)]
        found = index.at_tokens(part, at)
        assert [(d.number, hits) for d, hits, _ in found] == [(number, hits) for number, hits in expected if hits]
        assert all(first == min(t for t in at if t >= d.first_token) for d, _, first in found)
        for number in {*range(0, len(every), 5 * few), len(every) - 1}:
            again = Index(stream, source).document(part, number)
            assert again is not None and shown(again) == every[number] and again.number == number
        assert index.document(part, len(every)) is None and index.document(part, -1) is None


def test_a_document_is_found_in_few_shards(made: Made) -> None:
    stream, slicer = made
    for source, part, tokens in parts(slicer):
        shards = len(getattr(stream.manifest.mix.sources[source], part).shards)
        for number in range(0, len(documents(tokens)), 19):
            counted, store = counting(stream)
            Index(counted, source).document(part, number)
            assert 1 <= len(store.whole) <= 2 * log2(shards) + 2 and not store.ranges


def test_only_the_files_of_the_shards_in_question_are_read(eight: Stream) -> None:
    counted, store = counting(eight)
    index = Index(counted, TEXTS)
    assert not store.whole
    index.in_rows("train", [9, 8, 33])
    index.at_tokens("train", np.array([40 * WIDTH]))
    keys = {index_key("texts", "train", shard) for shard in (1, 4, 5)}
    assert set(store.whole) == keys and store.whole.total() == sum(eight.store.size(key) for key in keys)
    index.in_rows("train", [8, 33, 40])
    assert store.whole.total() == sum(eight.store.size(key) for key in keys)


def test_few_shards_are_held_at_a_time(eight: Stream) -> None:
    counted, store = counting(eight)
    index = Index(counted, TEXTS)
    shards = index.shards("train")
    assert shards > HELD
    for _ in range(2):
        assert len(list(index.named("train", "07.txt"))) == 1
        assert len(index._held) == HELD
    assert store.whole.total() == 2 * sum(eight.store.size(index_key("texts", "train", n)) for n in range(shards))


def test_what_is_no_table_of_documents_is_not_written(eight: Stream) -> None:
    table = pq.read_table(pa.BufferReader(eight.store.read(index_key("rows", "train", 0))))
    shuffled = table.select(["tokens", *(name for name in table.column_names if name != "tokens")])
    assert shard_index(shuffled) == shard_index(table) == eight.store.read(index_key("rows", "train", 0))
    for wrong in (
        table.drop_columns(["member"]),
        table.set_column(1, "file", pa.array([None] * len(table), pa.string())),
        table.set_column(4, "first_token", pa.array(["x"] * len(table))),
    ):
        with pytest.raises((ValueError, KeyError)):
            shard_index(wrong)


def changed(stream: Stream, key: str, change: Callable[[Columns], object] | bytes) -> Index:
    """The mix's first source with another file in its index, listed in the manifest as if it were the one."""
    if isinstance(change, bytes):
        data = change
    else:
        columns = pq.read_table(pa.BufferReader(stream.store.read(key))).to_pydict()
        change(columns)
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink)
        data = sink.getvalue()
    store = MemoryStore(f"changed {os.urandom(8).hex()}")
    for other in stream.store.list("docs/"):
        store.create(other, data if other == key else stream.store.read(other))
    files = stream.manifest.files | {key: stored(data)}
    return Index(Stream(stream.manifest.model_copy(update={"files": files}), store), 0)


def add(name: str, by: int, *rows: int) -> Callable[[Columns], None]:
    """Change a column, in these rows or in all."""

    def change(columns: Columns) -> None:
        for row in rows or range(len(columns[name])):
            columns[name][row] += by

    return change


def wrapped(columns: Columns) -> None:
    """Sums that come out right in 64 bits alone."""
    top = 2**63 - 1
    columns["tokens"][:3] = [top, top, sum(columns["tokens"][:3]) + 2]
    columns["first_token"][:3] = [columns["first_token"][0], top, -2]


def numbers_wrap(columns: Columns) -> None:
    """Numbers that run on in 64 bits alone."""
    count = len(columns["number"])
    columns["number"] = [2**63 - 1, *range(-(2**63), -(2**63) + count - 1)]


def empty(columns: Columns) -> None:
    """The first document has no tokens, not even an end."""
    columns["tokens"][1] += columns["tokens"][0]
    columns["tokens"][0], columns["first_token"][1] = 0, columns["first_token"][0]


def without(place: int) -> Callable[[Columns], None]:
    """A document left out at an end of the file."""
    return lambda columns: [column.pop(place) for column in columns.values()] and None


def twice(columns: Columns) -> None:
    for column in columns.values():
        column.append(column[0])


def none(columns: Columns) -> None:
    columns.update({name: pa.array([], COLUMNS.field(name).type) for name in columns})


MIDDLE, LAST = 2, -1


@pytest.mark.parametrize(
    ("shard", "change", "said"),
    [
        (0, b"no Parquet", "is no Parquet file: "),
        (0, lambda columns: columns.pop("member"), "has not an index's columns: number int64, file string, position"),
        (0, lambda columns: columns.update(tokens=[*map(float, columns["tokens"])]), "has not an index's columns"),
        (0, lambda columns: columns.update(more=columns["tokens"]), "has not an index's columns"),
        (0, lambda columns: columns["file"].__setitem__(0, None), "has gaps in its columns"),
        (0, none, "has documents that do not lie end to end"),
        (0, add("tokens", 1, 0), "has documents that do not lie end to end"),
        (MIDDLE, add("first_token", 1, 1), "has documents that do not lie end to end"),
        (MIDDLE, twice, "has documents that do not lie end to end"),
        (MIDDLE, empty, "has documents that do not lie end to end"),
        (0, wrapped, "has documents that do not lie end to end"),
        (MIDDLE, add("number", 1, 0), "whose numbers do not run on"),
        (MIDDLE, numbers_wrap, "whose numbers do not run on"),
        (MIDDLE, add("number", -1000), "whose numbers do not run on"),
        (MIDDLE, without(0), "the shard has tokens 512 to 767"),
        (MIDDLE, without(-1), "the shard has tokens 512 to 767"),
        (LAST, without(-1), "the shard has tokens "),
        (0, add("number", 1), "the mix has "),
        (MIDDLE, add("number", 1000), "the mix has "),
        (LAST, add("number", -1), "the mix has "),
        (MIDDLE, lambda columns: columns.update(number=[*range(len(columns["number"]))]), "the mix has "),
        (MIDDLE, add("first_window", -1, 0), "with a first_window that does not follow"),
        (LAST, add("last_window", 1, -1), "with a last_window that does not follow"),
    ],
)
def test_a_file_that_cannot_be_the_shards(eight: Stream, shard: int, change: Any, said: str) -> None:
    count = len(eight.manifest.mix.sources[0].train.shards)
    key = index_key("rows", "train", shard % count)
    index = changed(eight, key, change)
    with pytest.raises(InputFault, match=said) as error:
        index.in_rows("train", [8 * (shard % count)])
    assert f"{key} " in error.value.message and error.value.cause and error.value.next_step
    with pytest.raises(InputFault, match=said):
        list(index.named("train", ""))
    assert index.in_rows("held_out", [0])[0]  # other files are as good as before


def renamed(row: int) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns["member"][row] += "x"

    return change


@pytest.mark.parametrize("beside", [MIDDLE - 1, MIDDLE + 1])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("change", [lambda row: add("number", 1), renamed, lambda row: add("position", 1, row)])
def test_files_that_contradict_each_other(eight: Stream, change: Any, last: bool, beside: int) -> None:
    """Each alone could be the one: they have a document in common."""
    index = changed(eight, index_key("rows", "train", MIDDLE), change(-1 if beside > MIDDLE else 0))
    first, second = (MIDDLE, beside) if last else (beside, MIDDLE)
    index.in_rows("train", [8 * first])
    with pytest.raises(InputFault, match=r"contradicts a shard beside it: document \d+"):
        index.in_rows("train", [8 * second])


def test_more_documents_than_the_mix_has(eight: Stream) -> None:
    """A short file can say that it is a long one; it is not read to find out."""
    table = pa.table({name: pa.array([0] * 10**6, pa.int64()) for name in COLUMNS.names})
    named = pa.array([""] * 10**6)
    data = shard_index(table.set_column(1, "file", named).set_column(2, "member", named))
    assert len(data) < 10**5
    with pytest.raises(InputFault, match=r"says that it holds 1000000 documents \(\d+ bytes\), the mix \d+"):
        changed(eight, index_key("rows", "train", 0), data).in_rows("train", [0])


def test_names_that_are_no_text(eight: Stream) -> None:
    table = pq.read_table(pa.BufferReader(eight.store.read(index_key("rows", "train", 0))))
    raw = pa.array([b"\xff\xfe"] * len(table), pa.binary()).view(pa.string())
    data = shard_index(table.set_column(2, "member", raw))
    with pytest.raises(InputFault, match=r"is no Parquet file: .*UTF8"):
        changed(eight, index_key("rows", "train", 0), data).in_rows("train", [0])


def test_a_file_that_is_damaged_missing_or_not_listed(eight: Stream) -> None:
    key = index_key("rows", "train", 1)
    store = MemoryStore("index with a fault")
    for other in eight.store.list("docs/"):
        store.create(other, eight.store.read(other))
    index = Index(Stream(eight.manifest, store), 0)
    store.delete(key)
    with pytest.raises(MissingObject, match=key):
        index.in_rows("train", [8])
    store.create(key, eight.store.read(key)[:-1] + b"?")
    with pytest.raises(InputFault, match=f"{key} has digest"):
        index.in_rows("train", [8])
    files = {name: file for name, file in eight.manifest.files.items() if name != key}
    manifest: Manifest = eight.manifest.model_copy(update={"files": files})
    with pytest.raises(MissingObject, match=f"the manifest does not list {key}") as error:
        Index(Stream(manifest, store), 0).in_rows("train", [8])
    assert "prepared before" in error.value.cause
