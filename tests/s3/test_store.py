"""A store at s3:// keeps the promises of every store, on a real server."""

import multiprocessing
import os
from pathlib import Path

import pytest

from storage.errors import InputFault, MissingObject, StorageError, UsageError
from storage.store import S3Store, create_same, object_digest, open_store
from tests.s3.server import BUCKET, Server, client, seaweedfs
from tests.storage.test_store import (  # noqa: F401  (run here once more, over this folder's `store`)
    test_bad_keys_are_refused,
    test_create_read_list_delete,
    test_create_same,
    test_ranges,
    test_read_verifies,
)

LONG = 20 << 20  # bytes: three parts, the last one shorter


def long_object() -> bytes:
    return os.urandom(1 << 20) * (LONG >> 20) + b"end"


def test_a_long_object_in_pieces_of_any_length(store: S3Store) -> None:
    data = long_object()
    cut = [data[:5], memoryview(data)[5 : 9 << 20], b"", memoryview(data)[9 << 20 :]]
    assert store.create("long", cut)
    assert store.size("long") == len(data) and store.read("long", object_digest(data)) == data
    for start, length in ((0, len(data)), ((8 << 20) - 3, 7), (4 << 20, 9 << 20), (len(data) - 5, 5)):
        assert store.read_range("long", start, length) == data[start : start + length]
    with pytest.raises(InputFault, match=f"{len(data)} bytes"):
        store.read_range("long", len(data) - 5, 6)
    assert not store.create("long", data[::-1])
    assert not create_same(store, "long", cut)
    assert store.read("long") == data


def test_numbers_are_written_as_their_bytes(store: S3Store) -> None:
    import numpy as np

    numbers = np.arange(3_000_000, dtype="<u4")
    assert store.create("numbers", [memoryview(numbers)])
    assert store.read("numbers") == numbers.tobytes()


def test_an_empty_object(store: S3Store) -> None:
    assert store.create("empty", b"") and store.create("none", [])
    assert store.read("empty", object_digest(b"")) == b"" == store.read_range("none", 0, 0)
    with pytest.raises(InputFault, match="holds 0 bytes"):
        store.read_range("empty", 0, 1)


def test_a_listing_of_several_pages(store: S3Store, at_server: Server) -> None:
    plain = client(at_server)
    prefix = store.uri.removeprefix(f"s3://{BUCKET}/")
    keys = [f"many/{i:04d}" for i in range(1010)]
    for key in [*keys, ".hidden", "many/.tmp-1", "many/a b"]:
        plain.put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=b"")
    plain.put_object(Bucket=BUCKET, Key=f"{prefix}-neighbour/x", Body=b"")
    assert store.list() == keys and store.list("many/100") == keys[1000:]


def _race(uri: str, start: "multiprocessing.synchronize.Event", results: "multiprocessing.Queue[int]") -> None:
    store = S3Store.open(uri)
    start.wait()
    results.put(sum(store.create(f"new/{i}", b"%d" % os.getpid()) for i in range(10)))


def test_exactly_one_creator(store: S3Store) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_race, args=(store.uri, start, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    start.set()
    assert sum(results.get(timeout=120) for _ in workers) == 10
    for worker in workers:
        worker.join()
    assert len(store.list()) == 10


def _write_long(store: S3Store, data: bytes) -> None:
    assert store.create("child", data) and store.read("parent") == data


def test_a_store_goes_on_in_a_forked_process(store: S3Store) -> None:
    data = long_object()
    store.create("parent", data)
    child = multiprocessing.get_context("fork").Process(target=_write_long, args=(store, data))
    child.start()
    child.join(60)
    ended = child.exitcode
    child.kill()  # if it waits for threads of its parent, it waits for ever
    assert ended == 0 and store.read("child") == data


def test_objects_outlive_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = long_object()
    with seaweedfs(tmp_path) as first:
        for name, value in first.environment().items():
            monkeypatch.setenv(name, value)
        store = S3Store.open(f"s3://{BUCKET}")
        store.create("a/long", data)
        store.create("a/short", b"short")
    with seaweedfs(tmp_path, like=first) as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", second.endpoint)
        store = S3Store.open(f"s3://{BUCKET}")
        assert store.list() == ["a/long", "a/short"] and store.read("a/long") == data
        assert not store.create("a/short", b"other") and store.read("a/short") == b"short"


def test_addresses() -> None:
    assert open_store("s3://bucket/a/b/").uri == "s3://bucket/a/b" and open_store("s3://bucket").uri == "s3://bucket"
    for uri in ("s3://", "s3:///a", "s3:bucket", "s3://b", "s3://Bucket/a", "s3://bucket//a", "s3://bucket/../a",
                "s3://bucket/.a", "s3://bucket/a?versionId=1", "s3://host:9000/a"):  # fmt: skip
        with pytest.raises(UsageError, match="no address of an s3 store"):
            open_store(uri)
    with pytest.raises(UsageError) as caught:
        open_store("s3://AKIAKEY:canary@bucket/a")
    assert "canary" not in str(caught.value) and "AKIA" not in str(caught.value)


def test_no_such_bucket(at_server: Server) -> None:
    store = S3Store.open("s3://no-such-bucket/a")
    for call in (lambda: store.create("k", b""), lambda: store.read("k"), lambda: store.size("k"), store.list):
        with pytest.raises(StorageError, match="there is no bucket no-such-bucket") as caught:
            call()
        assert not isinstance(caught.value, MissingObject)
