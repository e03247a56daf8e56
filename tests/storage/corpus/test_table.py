"""Rows of Parquet and JSON lines files: every format the same documents, every skipped row counted by its reason."""

import datetime
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from storage.corpus import table
from storage.corpus.row import Row
from storage.corpus.spec import Rows
from storage.corpus.where import Filter
from storage.errors import InputFault, UsageError
from tests.storage.corpus.mixes import extracted

RECORDS: list[dict[str, Any]] = [
    {"text": "kept", "score": 3, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "low", "score": 2, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "none", "score": None, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "mixed", "score": 4, "licence": ["MIT", "GPL-3.0"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "unlicensed", "score": 4, "licence": [], "meta": {"lang": "en", "p": 0.9}},
    {"text": "deutsch", "score": 4, "licence": ["Apache-2.0", "MIT"], "meta": {"lang": "de", "p": 0.9}},
    {"text": "doubtful", "score": 4, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.4}},
    {"text": None, "score": 4, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "  ", "score": 4, "licence": ["MIT"], "meta": {"lang": "en", "p": 0.9}},
    {"text": "naïve 🙂", "score": 5, "licence": ["Apache-2.0"], "meta": {"lang": "en", "p": 0.5}},
]
REASONS = ["", *["filtered"] * 2, *["licence"] * 2, "language", "filtered", "empty", "empty", ""]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
CHOSEN = {
    "licences": {"column": "licence", "values": ["MIT", "Apache-2.0"]},
    "languages": {"column": "meta.lang", "values": ["en"]},
}
OF_JSON = {"where": "score >= 3 and (meta->>'p')::double >= 0.5", "columns": {"score": "BIGINT", "meta": "JSON"}}


def parquet(columns: Any, path: Path) -> bytes:
    pq.write_table(pa.table(columns) if isinstance(columns, dict) else columns, path)
    return path.read_bytes()


def found(name: str, data: bytes, **how: Any) -> list[Row]:
    return extracted(name, data, Rows.model_validate({"kind": "rows"} | how))


def frames(data: bytes) -> bytes:
    """Compressed by zstd, in two frames, as tools that write in parallel do."""
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    return b"".join(pa.compress(half, "zstd", asbytes=True) for half in halves)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("piece", [1, 50, 4 << 20])
def test_every_format_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, piece: int
) -> None:
    """Whatever is unpacked and filtered at a time."""
    monkeypatch.setattr(table, "PIECE", piece)
    monkeypatch.setattr(table, "BATCH", min(piece, 3))
    how: dict[str, Any] = OF_JSON
    data = {
        "jsonl": LINES,
        "jsonl.gz": gzip.compress(LINES[:99]) + gzip.compress(LINES[99:]),
        "jsonl.zst": frames(LINES),
    }
    if suffix == "parquet":
        data[suffix] = parquet(pa.Table.from_pylist(RECORDS), tmp_path / "rows")
        how = {"where": "score >= 3 and meta.p >= 0.5"}
    rows_found = found(f"a.b.{suffix}", data[suffix], **CHOSEN, **how)
    assert [row.reason for row in rows_found] == REASONS
    assert [row.text for row in rows_found if not row.reason] == ["kept", "naïve 🙂"]
    assert [row.position for row in rows_found] == list(range(len(RECORDS)))


def test_a_column_without_a_filter_needs_no_types() -> None:
    assert [row.reason for row in found("a.jsonl", LINES, **CHOSEN)][:7] == [
        "",
        "",
        "",
        "licence",
        "licence",
        "language",
        "",
    ]
    only = found("a.jsonl", b'{"licence": "MIT", "body": "x"}\n{"licence": "GPL", "body": "y"}', text="body",
                 licences=CHOSEN["licences"])  # fmt: skip
    assert [row.reason for row in only] == ["", "licence"]


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        ("BIGINT", "3", True),
        ("BIGINT", "3.0", False),
        ("BIGINT", '"3"', False),
        ("BIGINT", "true", False),
        ("BIGINT", "9223372036854775808", False),
        ("BIGINT", "-9223372036854775808", True),
        ("DOUBLE", "3", True),
        ("DOUBLE", "2.5", True),
        ("DOUBLE", "1" + "0" * 400, False),
        ("DOUBLE", "NaN", True),
        ("BOOLEAN", "true", True),
        ("BOOLEAN", "1", False),
        ("VARCHAR", '"\\u0000é"', True),
        ("VARCHAR", '"\\ud800"', False),
        ("VARCHAR", "1", False),
        ("JSON", '{"a": [1, null, "é"]}', True),
        ("JSON", '{"a": "\\ud800"}', False),
        ("JSON", "[NaN]", False),
        *((kind, "null", True) for kind in ("BIGINT", "DOUBLE", "BOOLEAN", "VARCHAR", "JSON")),
    ],
)
def test_a_value_of_another_type_is_malformed(kind: str, value: str, fits: bool) -> None:
    lines = f'{{"text": "a", "x": {value}}}\n{{"text": "b"}}\n'.encode()
    how = {"where": "x is not null or x is null", "columns": {"x": kind}}
    assert [row.reason for row in found("a.jsonl", lines, **how)] == ["" if fits else "malformed", ""]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("how", ["cut off", "damaged", "not compressed", "more behind"])
def test_a_damaged_file_is_one_clear_error(name: str, how: str) -> None:
    """Pinned as it is, so that no digest tells."""
    data = gzip.compress(LINES * 99) if name.endswith("gz") else pa.compress(LINES * 99, "zstd", asbytes=True)
    damaged = {
        "cut off": data[:-5],
        "damaged": data[:20] + bytes(20) + data[40:],
        "not compressed": LINES,
        "more behind": data + b"more",
    }
    with pytest.raises(InputFault, match=f"{name} cannot be unpacked"):
        found(name, damaged[how])


def test_a_file_that_unpacks_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PIECE", 100)
    monkeypatch.setattr(table, "MAX_ARCHIVE", 2000)
    monkeypatch.setattr(table, "MAX_MEMBER", 500)
    assert len(found("a.jsonl.gz", gzip.compress(b"{}\n" * 600))) == 600
    with pytest.raises(InputFault, match=r"a\.jsonl\.gz unpacks to .* at most 2000"):
        found("a.jsonl.gz", gzip.compress(b"{}\n" * 700))
    with pytest.raises(InputFault, match=r"a line of a\.jsonl\.zst unpacks to .* at most 500"):
        found("a.jsonl.zst", pa.compress(b" " * 700, "zstd", asbytes=True))


@pytest.mark.parametrize("name", ["a.json", "a.csv", "jsonl", "a.zst", "a.parquet.gz"])
def test_another_format(name: str) -> None:
    with pytest.raises(InputFault, match=r"rows are read from \.parquet, \.jsonl"):
        found(name, b"{}\n")


def test_lines_end_as_they_may() -> None:
    lines = b'{"text": "a\\r\\nb"}\r\n\r\n{"text": "c"}\n\n{"text": "d"}'
    assert [(row.text, row.reason) for row in found("a.jsonl", lines)] == [
        *(("a\r\nb", ""), (None, "empty"), ("c", ""), (None, "empty"), ("d", ""))
    ]
    assert [row.reason for row in found("a.jsonl", b'{"text": "a"}\n{"text": "cut off')] == ["", "malformed"]
    assert found("a.jsonl", b"") == []


def test_a_text_that_is_not_utf8_spoils_no_other(tmp_path: Path) -> None:
    texts = pa.array([b"good", b"caf\xe9", None, "né".encode()], pa.binary())
    for column in (texts.view(pa.string()), texts.view(pa.string()).cast(pa.binary()).cast(pa.large_binary())):
        data = parquet({"text": column}, tmp_path / "rows")
        assert [row.reason for row in found("a.parquet", data)] == ["", "undecodable", "empty", ""]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    data = parquet({"body": ["a"], "n": [1]}, tmp_path / "rows")
    for how in (
        {},
        {"text": "body", "where": "m > 1"},
        {"text": "body", "languages": {"column": "l.x", "values": ["en"]}},
    ):
        with pytest.raises(UsageError, match=r"a\.parquet has no column '(text|m|l)'; it has body, n"):
            found("a.parquet", data, **how)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("a.jsonl", {"where": "x > 1"}, r"columns that have no type(.|\n)*columns: \{x: BIGINT\}"),
        ("a.parquet", {"where": "x > 1", "columns": {"x": "BIGINT"}}, "has its own types"),
        ("a.parquet", {"where": "x"}, "gives BIGINT, not true or false"),
        ("a.parquet", {"where": "x = 'three'"}, "cannot be applied: .*three"),
        ("a.parquet", {"where": "x.y = 1"}, "cannot be applied"),
    ],
)
def test_a_filter_that_does_not_fit_the_file(tmp_path: Path, name: str, how: dict[str, Any], said: str) -> None:
    data = b'{"x": 1}\n' if name.endswith("l") else parquet({"text": ["a"], "x": [1]}, tmp_path / "rows")
    with pytest.raises(UsageError, match=said):
        found(name, data if name == "a.jsonl" else parquet({"text": ["a"], "x": [1]}, tmp_path / "rows"), **how)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("score >=", "not an SQL expression"),
        ("x from y", "not an SQL expression"),
        ("a) or (b", "not an SQL expression"),
        ("true); drop table x; --", "not an SQL expression"),
        ("x = 1 limit 3", "not an SQL expression"),
        ("a, b", "single expression"),
        ("1 = 1", "reads no column"),
        ("x > random()", r"random\(\)"),
        ("x > now()", r"now\(\)"),
        ("x = getenv('HOME')", r"getenv\(\)"),
        ("x = current_setting('threads')", r"current_setting\(\)"),
        ("x in (select text from read_text('/etc/passwd'))", "subquery"),
        ("sum(x) > 1", r"sum\(\)"),
        ("row_number() over () > x", "window|row_number"),
        ("x collate nocase = 'a'", "collate"),
        ("x = ?", "parameter"),
        ("columns(*) = 1", "star"),
    ],
)
def test_a_filter_that_is_no_function_of_the_row_is_refused(where: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Rows(where=where)


def test_a_filter_that_came_past_that_check_still_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a")
    where = f"(select content from read_text('{tmp_path / 'secret'}')) = x"
    with pytest.raises(UsageError, match="disabled by configuration"):
        Filter("a.parquet", where, {})(pa.table({"x": ["a"]}))


def test_columns_are_those_that_the_filter_reads() -> None:
    for columns in ({"x": "BIGINT"}, {"x": "BIGINT", "y": "JSON", "z": "DOUBLE"}):
        with pytest.raises(ValidationError, match=r"where reads \['x', 'y'\]"):
            Rows.model_validate({"where": "x > 1 and y->>'a' = 'b'", "columns": columns})
    with pytest.raises(ValidationError, match="where reads"):
        Rows.model_validate({"columns": {"x": "BIGINT"}})


_TIMES = """
import sys
from pathlib import Path
from storage.corpus.extract import rows
from storage.corpus.spec import Rows
from storage.corpus.where import Filter
how = Rows(where="seen > '2020-01-01 03:00'")
print([row.reason for row in rows("a.parquet", Path(sys.argv[1]).read_bytes(), how, Path())])
"""


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_a_time_is_compared_alike_in_every_time_zone(tmp_path: Path, zone: str) -> None:
    times = [datetime.datetime(2020, 1, 1, hour, tzinfo=datetime.UTC) for hour in (0, 4)]
    parquet({"text": ["a", "b"], "seen": pa.array(times, pa.timestamp("us", "UTC"))}, tmp_path / "rows")
    command = [sys.executable, "-c", _TIMES, str(tmp_path / "rows")]
    result = subprocess.run(command, env=os.environ | {"TZ": zone}, capture_output=True, text=True, check=True)
    assert result.stdout == "['filtered', '']\n"


def called(depth: int, line: bytes) -> list[str]:
    """Why rows are skipped, where the caller itself is called from so deep."""
    return called(depth - 1, line) if depth else [row.reason for row in extracted("a.jsonl", line, Rows())]


@pytest.mark.parametrize(("depth", "reason"), [(199, ""), (200, "malformed"), (700, "malformed"), (10**6, "malformed")])
def test_how_deep_a_row_may_nest_hangs_on_no_caller(depth: int, reason: str) -> None:
    """Python's parser gives up where its caller's stack ends, so that workers and one process read different rows."""
    line = b'{"text": "[\\"{", "deep": ' + b"[" * depth + b"]" * depth + b"}\n"
    assert called(0, line) == called(400, line) == [reason]
    wide = b'{"text": "[", "wide": [' + b",".join([b"[{}]"] * 500) + b'], "open": "[\\\\"}\n'
    assert called(400, wide) == [""]
