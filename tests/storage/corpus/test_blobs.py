"""Blobs of Software Heritage's archive: whatever its store does, the same rows in the same order, or one error."""

import gzip
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.corpus import blobs, remote
from storage.corpus import download as downloads
from storage.corpus.extract import rows
from storage.corpus.row import Row
from storage.corpus.spec import SoftwareHeritage, SourceSpec
from storage.errors import InputFault, MissingObject, StorageError, VerbatimError
from tests.file_server import CutOff, FileServer, Other, Right, Stalled, Status, Whole, serving
from tests.storage.corpus.mixes import collect, pin, prose

TEXTS = [f"{number} {prose(number, 60 + 700 * (number % 7 == 0))}" for number in range(45)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(downloads, "PAUSE", 0.001)
    monkeypatch.setattr(remote, "SILENCE", 0.5)
    with serving() as started:
        monkeypatch.setattr(blobs, "ADDRESS", f"{started.url}/content/")
        for text in TEXTS:
            stored(started, text.encode())
        yield started


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def stored(server: FileServer, data: bytes) -> str:
    """The name under which the server has the data from now on."""
    server.files[f"content/{sha1(data)}"] = gzip.compress(data)
    return sha1(data)


def record(text: str | bytes, **changes: Any) -> dict[str, Any]:
    data = text.encode() if isinstance(text, str) else text
    about = {"blob_id": sha1(data), "src_encoding": "UTF-8", "license_type": "permissive", "length_bytes": len(data)}
    return about | changes


def lines(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read(cache: Path, data: bytes, name: str = "a.jsonl", **how: Any) -> list[Row]:
    return list(rows(name, data, SoftwareHeritage.model_validate(how), cache))


def expected(texts: list[str]) -> list[Row]:
    return [Row(sha1(text.encode()), position, text) for position, text in enumerate(texts)]


ALL = lines(*map(record, TEXTS))


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_the_rows_come_in_order_however_many_are_asked_for(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(blobs, "AT_ONCE", at_once)
    monkeypatch.setattr(downloads, "TRIES", 13)
    server.faults += random.Random(at_once).sample([Stalled(0), CutOff(20), Status(500), Status(503, "0")] * 3, 12)
    assert read(tmp_path, ALL) == expected(TEXTS)
    assert {asked.path for asked in server.asked} == {f"content/{sha1(text.encode())}" for text in TEXTS}
    assert len(server.asked) == len(TEXTS) + 12


def test_several_are_asked_for_at_a_time(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six answers wait for each other, so that none comes unless all were asked for; a seventh never is meanwhile."""
    monkeypatch.setattr(blobs, "AT_ONCE", 6)
    together = threading.Barrier(6)
    asked: list[int] = []

    def meet(to: Any, data: bytes) -> None:
        together.wait(20)
        asked.append(len(server.asked))
        together.wait(20)
        Right()(to, data)

    server.faults += [meet] * 6
    assert read(tmp_path, ALL) == expected(TEXTS)
    assert asked == [6] * 6 and not together.broken


def test_a_parquet_file_and_its_filters(server: FileServer, tmp_path: Path) -> None:
    records = [
        record(TEXTS[0]),
        record(TEXTS[1], license_type="no_license"),
        record(TEXTS[2], length_bytes=1_000_001),
        record(TEXTS[3], blob_id=None),
        record(TEXTS[4], blob_id=sha1(b"?").upper()),
        record(TEXTS[5], blob_id="../../../../etc/passwd"),
        record(TEXTS[6], src_encoding=None),
        record(TEXTS[7], src_encoding="é"),
        record(TEXTS[8]),
    ]
    reasons = ["", "licence", "filtered", *["malformed"] * 5, ""]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows")
    how: dict[str, Any] = {"licences": {"column": "license_type", "values": ["permissive"]}}
    how["where"] = "length_bytes <= 1000000"
    found = read(tmp_path, (tmp_path / "rows").read_bytes(), "a.parquet", **how)
    assert [row.reason for row in found] == reasons and [row.position for row in found] == list(range(9))
    assert found == read(tmp_path, lines(*records), columns={"length_bytes": "BIGINT"}, **how)
    assert [row.text for row in found if row.text] == [TEXTS[0], TEXTS[8]] and len(server.asked) == 2


@pytest.mark.parametrize(
    ("data", "encoding", "text", "reason"),
    [
        (b"caf\xe9", "ISO-8859-1", "café", ""),
        ("数据".encode("gb18030"), "GB18030", "数据", ""),
        ("naïve".encode("utf-16"), "UTF-16", "naïve", ""),
        (b"caf\xe9", "UTF-8", None, "undecodable"),
        (b"caf\xe9", "ascii", None, "undecodable"),
        (b"abc", "no-such", None, "unknown encoding"),
        (b"abc", "rot13", None, "unknown encoding"),
        (b"abc", "utf\x008", None, "unknown encoding"),
        (b"", "UTF-8", None, "empty"),
        (b" \n", "UTF-8", None, "empty"),
        (b"\x1f\x8bxyz", "ISO-8859-1", "\x1f\x8bxyz", ""),
    ],
)
def test_what_a_rows_encoding_makes_of_its_blob(
    server: FileServer, tmp_path: Path, data: bytes, encoding: str, text: str | None, reason: str
) -> None:
    """Depends on the bytes alone, so that a row that has no text is counted."""
    stored(server, data)
    assert read(tmp_path, lines(record(data, src_encoding=encoding))) == [Row(sha1(data), 0, text, reason)]


def test_a_blob_is_fetched_once_and_verified_on_every_use(server: FileServer, tmp_path: Path) -> None:
    """Twice the same within a file, too, unless both are asked for at once; what was kept and is damaged comes anew."""
    assert read(tmp_path, ALL) == read(tmp_path, ALL) == expected(TEXTS)
    assert len(server.asked) == len(TEXTS)
    kept = sorted((tmp_path / "blobs").rglob("*"))
    files = [path for path in kept if path.is_file()]
    assert [path.name for path in files] == sorted(sha1(text.encode()) for text in TEXTS)
    assert all(path.parent.name == path.name[:2] for path in files)
    files[0].write_bytes(files[1].read_bytes())
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[3].write_bytes(b"")
    server.asked.clear()
    assert read(tmp_path, ALL) == expected(TEXTS)
    assert sorted(asked.path for asked in server.asked) == [f"content/{files[at].name}" for at in (0, 2, 3)]
    server.asked.clear()
    assert read(tmp_path, ALL) == expected(TEXTS) and server.asked == []


def faulty(server: FileServer, number: int, *faults: Any) -> str:
    """Let the answers to the blob of that row be wrong; returns its address."""
    path = f"content/{sha1(TEXTS[number].encode())}"
    server.faults_of[path] = list(faults)
    return f"{server.url}/{path}"


PACKED = gzip.compress(TEXTS[40].encode())


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (Other(gzip.compress(b"other")), InputFault, f"serves another blob: 5 bytes, sha1 {sha1(b'other')}; expected"),
        (Other(PACKED[:-1]), InputFault, "cannot be unpacked"),
        (Other(PACKED[:9] + b"!!" + PACKED[11:]), InputFault, "cannot be unpacked"),
        (Other(TEXTS[40].encode()), InputFault, "not packed by gzip"),
        (Other(b""), InputFault, "not packed by gzip: 0 bytes"),
        (CutOff(30, told=False), InputFault, "cannot be unpacked"),
        (Status(404), MissingObject, "404 Not Found"),
        (Status(403), VerbatimError, "403 Forbidden"),
    ],
)  # fmt: skip
def test_a_blob_that_is_missing_or_differs_is_one_error(
    server: FileServer, tmp_path: Path, fault: Any, kind: type[VerbatimError], said: str
) -> None:
    """Never a skipped row; what came before is kept, and the next call goes on."""
    address = faulty(server, 40, fault)
    with pytest.raises(kind, match=said) as error:
        read(tmp_path, ALL)
    assert address in error.value.message and error.value.cause
    assert not list(tmp_path.rglob(f"*{sha1(TEXTS[40].encode())}*"))
    asked = len(server.asked)
    assert 41 <= asked <= len(TEXTS)
    assert read(tmp_path, ALL) == expected(TEXTS) and len(server.asked) == len(TEXTS) + 1


def test_a_blob_that_was_taken_out_can_be_left_out(server: FileServer, tmp_path: Path) -> None:
    del server.files[f"content/{sha1(TEXTS[0].encode())}"]
    with pytest.raises(MissingObject) as error:
        read(tmp_path, ALL)
    condition = f"blob_id != '{sha1(TEXTS[0].encode())}'"
    assert condition in error.value.next_step
    found = read(tmp_path, ALL, where=condition, columns={"blob_id": "VARCHAR"})
    assert found == [Row("", 0, None, "filtered"), *expected(TEXTS)[1:]]


@pytest.mark.parametrize("fault", [Stalled(5), CutOff(30), CutOff(30, reset=True), Status(500), Status(429)])
def test_tries_end(server: FileServer, tmp_path: Path, fault: Any) -> None:
    address = faulty(server, 3, *[fault] * 5)
    with pytest.raises(VerbatimError, match="5 times in a row") as error:
        read(tmp_path, ALL)
    assert address in error.value.message and error.value.exit_code == 1
    assert read(tmp_path, ALL) == expected(TEXTS)


def test_the_first_error_in_the_files_order_is_told_and_the_rest_is_not_awaited(
    server: FileServer, tmp_path: Path
) -> None:
    """Though a later one came first; the others, that would wait for their next try, end at once."""
    faulty(server, 9, Status(404))
    address = faulty(server, 2, Stalled(0), Status(404))
    for number in range(10, 16):
        faulty(server, number, *[Status(503, "60")] * 5)
    begin = time.monotonic()
    with pytest.raises(MissingObject) as error:
        read(tmp_path, ALL)
    assert address in error.value.message and time.monotonic() - begin < 30


def test_no_more_are_asked_for_than_are_wanted(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "AT_ONCE", 2)
    begun = rows("a.jsonl", ALL, SoftwareHeritage(), tmp_path)
    assert next(begun) == expected(TEXTS)[0]
    time.sleep(0.5)
    begun.close()  # type: ignore[attr-defined]
    assert 1 <= len(server.asked) <= 5


def test_a_blob_that_unpacks_without_end(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_BLOB", 1000)
    good, large = stored(server, bytes(1000)), stored(server, bytes(1001))
    noise = random.Random(1).randbytes(1500)
    assert [row.member for row in read(tmp_path, lines(record(bytes(1000))))] == [good]
    with pytest.raises(InputFault, match=f"blob {large} unpacks to 1001 bytes or more, at most 1000"):
        read(tmp_path, lines(record(bytes(1001))))
    name = stored(server, noise)
    server.faults.append(Whole(told=False))
    with pytest.raises(InputFault, match=f"{name} has 1... bytes or more, at most 1000"):
        read(tmp_path, lines(record(noise)))


def test_a_cache_that_may_not_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not be stored in .*file"):
        read(tmp_path / "file", ALL)


def test_readers_of_one_cache(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keep the same blob at the same moment: each has written its own before the first gets its name."""
    written, replace, found = threading.Barrier(3), os.replace, []

    def together(part: Path, path: Path) -> None:
        written.wait(20)
        replace(part, path)

    monkeypatch.setattr(blobs.os, "replace", together)
    one = lines(record(TEXTS[0]))
    threads = [threading.Thread(target=lambda: found.append(read(tmp_path, one))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected(TEXTS[:1])] * 3
    assert [path.name for path in (tmp_path / "blobs").glob("*/*")] == [sha1(TEXTS[0].encode())]


def test_a_source_of_blobs(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ALL + lines(record(TEXTS[0], blob_id="x")))
    file = pin(tmp_path / "a.jsonl", kind="software_heritage")
    found = collect(SourceSpec.model_validate({"name": "s", "files": [file]}), tmp_path / "cache")
    assert found == (TEXTS, {"malformed": 1})
