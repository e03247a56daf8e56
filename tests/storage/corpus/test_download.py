"""Files of web servers and of the hub: whatever the server does, the pinned bytes or one clear error."""

import hashlib
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from storage.corpus import download as downloads
from storage.corpus import remote
from storage.corpus.fetch import fetch, read_pinned
from storage.corpus.spec import HubFile, UrlFile
from storage.errors import InputFault, MissingObject, StorageError, VerbatimError
from tests.file_server import TOKEN, CutOff, FileServer, Misplaced, Other, Right, Stalled, Status, Whole, serving

DATA = random.Random(1).randbytes(300_000)
OLDER = random.Random(2).randbytes(300_000)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No waiting between tries, and little for silent servers; returns how long would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(downloads.time, "sleep", waited.append)
    monkeypatch.setattr(remote, "SILENCE", 0.5)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return waited


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as started:
        started.files["a/b.jsonl"] = DATA
        yield started


def url_file_fields(data: bytes) -> dict[str, Any]:
    about = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"kind": "url", "licence": "MIT", "extract": {"kind": "rows"}} | about


def url_file(server: FileServer) -> UrlFile:
    return UrlFile.model_validate(url_file_fields(DATA) | {"url": f"{server.url}/a/b.jsonl"})


def hub_file() -> HubFile:
    about = {"kind": "hub", "dataset": "some/set", "revision": COMMIT, "file": "data/a 1.parquet"}
    return HubFile.model_validate(url_file_fields(DATA) | about)


def part(cache: Path) -> Path:
    return cache / f"{hashlib.sha256(DATA).hexdigest()}.part"


def test_a_file_is_fetched_once_and_verified_on_every_use(server: FileServer, tmp_path: Path) -> None:
    pin = url_file(server)
    assert read_pinned(pin, tmp_path) == DATA and read_pinned(pin, tmp_path) == DATA
    assert server.ranges == [None]
    assert [path.name for path in tmp_path.iterdir()] == [pin.sha256]
    (tmp_path / pin.sha256).write_bytes(OLDER)
    with pytest.raises(InputFault, match="differs from its pin") as error:
        read_pinned(pin, tmp_path)
    assert "downloaded anew" in error.value.next_step


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [
        ([CutOff(100_000)], [None, "bytes=100000-"]),
        ([CutOff(100_000, reset=True)], [None, "*"]),
        ([CutOff(100_000), CutOff(50_000), Stalled(1)], [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]),
        ([Stalled(7)], [None, "bytes=7-"]),
        ([Stalled(0), Status(500), Status(503), Status(429)], [None] * 5),
        ([CutOff(9), Misplaced()], [None, "bytes=9-", "bytes=9-"]),
        ([CutOff(9), Whole()], [None, "bytes=9-"]),
        ([CutOff(9), Whole(told=False)], [None, "bytes=9-"]),
        ([Whole(told=False)], [None]),
    ],
)
def test_a_connection_that_breaks_is_continued(
    server: FileServer, tmp_path: Path, faults: list[Any], ranges: list[str | None]
) -> None:
    server.faults += faults
    assert read_pinned(url_file(server), tmp_path) == DATA
    assert [None if found is None else "*" if "*" in ranges else found for found in server.ranges] == ranges
    assert not server.faults


def test_what_has_come_is_told(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the begin, for about every PIECE, after what a former call kept, and at the end."""
    monkeypatch.setattr(downloads, "PIECE", 50_000)
    told: list[tuple[int, int]] = []
    server.faults.append(CutOff(120_000))
    path = fetch(url_file(server), tmp_path, lambda done, total: told.append((done, total)))
    done = [at for at, total in told if total == len(DATA)]
    assert path.read_bytes() == DATA and len(done) == len(told) and done == sorted(done)
    assert done[0] == 0 and 120_000 in done and done[-1] == len(DATA) and 6 <= len(done) <= 9
    told.clear()
    assert fetch(url_file(server), tmp_path, lambda done, total: told.append((done, total))) == path and told == []


def test_a_file_is_not_held_in_memory(server: FileServer, tmp_path: Path) -> None:
    data = bytes(40 << 20)
    server.files["large"] = data
    pin = UrlFile.model_validate(url_file_fields(data) | {"url": f"{server.url}/large"})
    tracemalloc.start()
    try:
        fetch(pin, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_tries_end_where_no_byte_comes_and_start_anew_where_one_did(
    server: FileServer, tmp_path: Path, impatient: list[float]
) -> None:
    server.faults += [Status(500)] * 4 + [CutOff(10)] + [Status(502)] * 3 + [CutOff(10)] + [Status(500)] * 4
    with pytest.raises(VerbatimError, match="500 Internal Server Error, 5 times in a row; 20 of 300000 bytes") as error:
        read_pinned(url_file(server), tmp_path)
    assert "goes on from there" in error.value.next_step and error.value.exit_code == 1
    assert impatient == [1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8]
    assert part(tmp_path).stat().st_size == 20
    assert read_pinned(url_file(server), tmp_path) == DATA
    assert server.ranges[-1] == "bytes=20-"


def test_a_server_that_asks_to_wait(server: FileServer, tmp_path: Path, impatient: list[float]) -> None:
    server.faults += [Status(429, "7"), Status(503, "99999"), Status(429, "soon")]
    assert read_pinned(url_file(server), tmp_path) == DATA
    assert impatient == [7, 300, 4]


def test_no_server(server: FileServer, tmp_path: Path) -> None:
    pin = url_file(server).model_copy(update={"url": "http://127.0.0.1:9/a.jsonl"})
    with pytest.raises(VerbatimError, match=r"no connection, or it broke: .*Connection refused, 5 times in a row"):
        read_pinned(pin, tmp_path)


@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize(
    "changed",
    [OLDER, DATA[:-1] + b"!", DATA[:2000], DATA + b"more", b"", DATA[:500]],
    ids=["other", "last byte", "shorter", "longer", "empty", "shorter than the part"],
)
def test_a_changed_file_is_one_error_with_both_digests(
    server: FileServer, tmp_path: Path, changed: bytes, kept: int
) -> None:
    """Whether it changed before the first byte came or after some had."""
    pin = url_file(server)
    part(tmp_path).write_bytes(DATA[:kept])
    server.files["a/b.jsonl"] = changed
    with pytest.raises(InputFault) as error:
        read_pinned(pin, tmp_path)
    assert f"{len(changed)} bytes, sha256 " in error.value.message and pin.sha256 in error.value.message
    assert hashlib.sha256(changed[: pin.size]).hexdigest() in error.value.message
    assert error.value.exit_code == 11 and error.value.cause and error.value.next_step
    assert server.ranges[-1] is None  # the digest that is shown is of the whole file
    assert os.listdir(tmp_path) == [part(tmp_path).name] and part(tmp_path).stat().st_size == 0


def test_a_longer_file_of_untold_length(server: FileServer, tmp_path: Path) -> None:
    server.files["a/b.jsonl"] = DATA + b"more"
    server.faults.append(Whole(told=False))
    with pytest.raises(InputFault, match=r"300001 bytes, sha256 of its beginning .* expected 300000 bytes"):
        read_pinned(url_file(server), tmp_path)


@pytest.mark.parametrize("kept", [OLDER[:1000], OLDER, DATA[:100] + b"!" + DATA[101:9000], DATA + b"more"])
def test_a_part_of_an_older_file_is_given_up(server: FileServer, tmp_path: Path, kept: bytes) -> None:
    part(tmp_path).write_bytes(kept)
    assert read_pinned(url_file(server), tmp_path) == DATA


def test_the_rest_of_a_file_of_another_size_is_not_awaited(server: FileServer, tmp_path: Path) -> None:
    part(tmp_path).write_bytes(DATA[:1000])
    server.files["a/b.jsonl"] = DATA + b"more"
    server.faults.append(Stalled(0))
    with pytest.raises(InputFault, match="serves another file"):
        read_pinned(url_file(server), tmp_path)
    assert server.ranges == ["bytes=1000-", None]


def test_a_file_that_changes_while_it_is_fetched(server: FileServer, tmp_path: Path) -> None:
    server.files["a/b.jsonl"] = DATA
    server.faults += [CutOff(1000), Other(OLDER), Right()]
    assert read_pinned(url_file(server), tmp_path) == DATA
    assert server.ranges == [None, "bytes=1000-", None]


def test_a_whole_part_is_not_asked_for_again(server: FileServer, tmp_path: Path) -> None:
    part(tmp_path).write_bytes(DATA)
    told: list[tuple[int, int]] = []
    fetch(url_file(server), tmp_path, lambda done, total: told.append((done, total)))
    assert read_pinned(url_file(server), tmp_path) == DATA and server.ranges == []
    assert told == [(len(DATA), len(DATA))]


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (404, MissingObject, "404 Not Found"),
        (410, MissingObject, "410 Gone"),
        (403, VerbatimError, "403 Forbidden"),
        (400, VerbatimError, "400 Bad Request"),
    ],
)
def test_a_server_that_refuses_is_asked_once(
    server: FileServer, tmp_path: Path, code: int, kind: type[VerbatimError], said: str
) -> None:
    server.faults.append(Status(code))
    with pytest.raises(kind, match=said) as error:
        read_pinned(url_file(server), tmp_path)
    assert len(server.ranges) == 1 and error.value.cause


def test_two_processes_that_want_one_file_fetch_it_once(server: FileServer, tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(read_pinned(url_file(server), tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 4 and server.ranges == [None]


_FETCH = """
import sys
from pathlib import Path
from storage.corpus.fetch import read_pinned
from storage.corpus.spec import UrlFile
read_pinned(UrlFile.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_process_is_gone_on_from(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(Stalled(200_000))
    pin = url_file(server)
    with subprocess.Popen([sys.executable, "-c", _FETCH, pin.model_dump_json(), str(tmp_path)]) as process:
        while not (part(tmp_path).exists() and part(tmp_path).stat().st_size > 100_000) and process.poll() is None:
            threading.Event().wait(0.01)
        process.kill()
    kept = part(tmp_path).stat().st_size
    assert read_pinned(pin, tmp_path) == DATA
    assert kept > 100_000 and server.ranges == [None, f"bytes={kept}-"]


def test_a_cache_that_may_not_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not be stored in .*file"):
        read_pinned(url_file(server), tmp_path / "file")


def test_a_file_of_the_hub(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By commit, through a redirect to another host, which gets the range but not the token."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    path = f"datasets/some/set/resolve/{COMMIT}/data/a%201.parquet"
    server.files[path] = DATA
    server.faults.append(CutOff(1000))
    told: list[tuple[int, int]] = []
    fetch(hub_file(), tmp_path, lambda done, total: told.append((done, total)))
    assert read_pinned(hub_file(), tmp_path) == DATA and told[-1] == (len(DATA), len(DATA))
    here, there = f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"
    first, second = (None, "bytes=1000-")
    assert [asked[1:] for asked in server.asked] == [
        (here, path, first, f"Bearer {TOKEN}"),
        (there, f"cdn/{path}", first, None),
        (here, path, second, f"Bearer {TOKEN}"),
        (there, f"cdn/{path}", second, None),
    ]


def test_a_set_with_terms_to_accept(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/gated")
    monkeypatch.setattr("storage.corpus.hub.get_token", lambda: os.environ.get("HF_TOKEN"))
    server.files[f"datasets/some/set/resolve/{COMMIT}/data/a%201.parquet"] = DATA
    with pytest.raises(VerbatimError, match="401 Unauthorized") as error:
        read_pinned(hub_file(), tmp_path)
    assert "accept its terms" in error.value.next_step
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read_pinned(hub_file(), tmp_path) == DATA


def test_the_hub_no_longer_has_it(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with pytest.raises(
        MissingObject, match=r"some/set/resolve/0123456789abcdef.*a%201\.parquet: the server answers 404"
    ):
        read_pinned(hub_file(), tmp_path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """What stands behind s3:// addresses here: a store in memory."""
    store = MemoryFileSystem()
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **_: (store, url.removeprefix("s3:/")))
    yield store
    store.rm("/some-bucket", recursive=True)


def s3_file() -> UrlFile:
    return UrlFile.model_validate(url_file_fields(DATA) | {"url": "s3://some-bucket/a/b.jsonl"})


def test_a_file_of_an_s3_store(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    bucket.pipe_file("/some-bucket/a/b.jsonl", OLDER[:1000] + DATA[1000:])
    part(tmp_path).write_bytes(DATA[:1000])
    assert read_pinned(s3_file(), tmp_path) == DATA  # so the first 1,000 bytes were not read again


@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("changed", [OLDER, DATA[:500], DATA + b"more"], ids=["other", "shorter", "longer"])
def test_a_changed_file_of_an_s3_store(bucket: MemoryFileSystem, tmp_path: Path, changed: bytes, kept: int) -> None:
    bucket.pipe_file("/some-bucket/a/b.jsonl", changed)
    part(tmp_path).write_bytes(DATA[:kept])
    with pytest.raises(InputFault, match=f"{len(changed)} bytes, sha256 ") as error:
        read_pinned(s3_file(), tmp_path)
    assert hashlib.sha256(changed[: len(DATA)]).hexdigest() in error.value.message


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (FileNotFoundError(), MissingObject, "there is no s3://some-bucket/a/b.jsonl"),
        (PermissionError("no"), VerbatimError, "cannot be read: PermissionError: no"),
        (ImportError("Install s3fs"), VerbatimError, "Install s3fs"),
        (LookupError("no credentials"), VerbatimError, "cannot be read: LookupError: no credentials"),
        (TimeoutError("slow"), VerbatimError, "TimeoutError: slow, 5 times in a row"),
    ],
)
def test_an_s3_store_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Exception, kind: type[VerbatimError], said: str
) -> None:
    def fail(url: str, **_: Any) -> None:
        raise raised

    monkeypatch.setattr(fsspec, "url_to_fs", fail)
    with pytest.raises(kind, match=said):
        read_pinned(s3_file(), tmp_path)
