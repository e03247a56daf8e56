"""Files with more text than 32-bit offsets reach: 3 GiB of zeros that no page of memory stands behind."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.corpus import runs
from storage.corpus.parts import Parts
from storage.corpus.prepare import prepare
from storage.corpus.runs import Encode, Piece
from storage.corpus.sample import Train
from storage.corpus.spec import TrainTokenizer
from storage.store import MemoryStore
from tests.storage.corpus.mixes import small


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> pa.Table:
    """9 rows in 3 chunks: of every three texts one has a GiB."""
    size = 2**30
    data = np.zeros(size + 2, np.uint8)
    data[[0, -1]] = ord("a"), ord("b")
    offsets = pa.array(np.array([0, 1, 1 + size, 2 + size], np.int32)).buffers()[1]
    chunk = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(data))
    table = pa.table({"text": pa.chunked_array([chunk] * 3)})
    monkeypatch.setattr(Parts, "table", lambda self, name: table)
    return table


def test_of_a_large_file_some_rows_are_drawn(large: pa.Table, tmp_path: Path) -> None:
    job = Train(Parts(tmp_path, ""), TrainTokenizer(vocab=257, sample_bytes=1), (("x", np.array([0, 5, 6])),), 1)
    assert list(job._texts()) == ["a", "b", "a"]


def test_of_a_large_file_some_rows_are_left_out(large: pa.Table) -> None:
    kept = runs._rows(large, Piece("x", 0, 0, 9, np.array([1, 2, 4, 7]), 0))
    assert kept["text"].to_pylist() == ["a", "a", "b", "a", "b"]
    assert kept.num_rows == 5 and runs._rows(large, Piece("x", 0, 1, 9, np.array([], np.int64), 1)).num_rows == 8
    assert runs._rows(large, Piece("x", 0, 2, 4, np.array([2]), 2))["text"].to_pylist() == ["a"]


def test_names_of_members_have_offsets_of_64_bits_where_they_are_joined(tmp_path: Path) -> None:
    """The names of a run may have more bytes than its texts, which its budget counts."""
    found: list[pa.Schema] = []

    def run(stage: str, jobs: list[Encode], done: object) -> None:
        for job in jobs:
            job()
            found.extend([job.parts.table(job.name).schema] if stage == "encode" else [])

    prepare(small(tmp_path), tmp_path, MemoryStore(str(tmp_path)), run=run)  # type: ignore[arg-type]
    assert found and all(schema.field("member").type == pa.large_string() for schema in found)
