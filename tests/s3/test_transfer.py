"""Copying objects to and from a real S3 server: within bounded memory, read back once, stopped and continued."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from storage.copying import OBJECTS, READS, Copy, PublishProgress, Source, copy_all
from storage.errors import InputFault
from storage.s3_upload import PART
from storage.store import LocalStore, MemoryStore, S3Store, Store, object_digest
from tests.s3.proxy import Fault, Proxy, Request, completions, gets, nul_answer, part_puts, puts, wrong_answer

MIB = 1 << 20
LONG = os.urandom(MIB) * 18  # three parts
SHORT = {f"ledger/{number:08d}.jsonl": os.urandom(1000 + number) for number in range(40)}
GB = 10**9
ROOM = 384 * MIB  # for copying, beside what was loaded before, however long objects are; 244 up, 208 down as measured
COPY = """
import json, sys
from pathlib import Path
from storage.copying import Source, copy_all
from storage.store import open_store
source, target, *keys = sys.argv[1:]
open_store(target).list(), open_store(source).list()
memory = lambda what: int(Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) << 10
before = memory("VmRSS")
copies = copy_all({key: Source(open_store(source), key) for key in keys}, open_store(target))
print(json.dumps({"digests": {key: copy.digest for key, copy in copies.items()}, "room": memory("VmHWM") - before}))
"""


def filled(store: Store, objects: dict[str, bytes]) -> dict[str, Source]:
    """All of them in the store, and as work."""
    for key, data in objects.items():
        store.create(key, data)
    return {key: Source(store, key) for key in objects}


def copies(objects: dict[str, bytes], new: bool) -> dict[str, Copy]:
    return {key: Copy(object_digest(data), len(data), new) for key, data in objects.items()}


@pytest.fixture
def here(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "here")


def test_up_down_and_again(store: S3Store, here: LocalStore, tmp_path: Path) -> None:
    objects = {"ledger/header.json": b"header", "long": LONG, "empty": b"", "a-part": LONG[:PART], **SHORT}
    work, reports = filled(here, objects), list[PublishProgress]()
    assert copy_all(work, store, reports.append) == copies(objects, new=True)
    assert [report.objects for report in reports] == list(range(1, len(objects) + 1))
    assert reports[0].key == "ledger/header.json" and {report.key for report in reports} == set(objects)
    last = reports[-1]
    assert last.bytes == last.of_bytes == sum(map(len, objects.values())) and last.seconds_left == 0
    assert last.rate == last.bytes / last.seconds
    assert {key: store.read(key) for key in store.list()} == objects
    assert copy_all(work, store) == copies(objects, new=False)
    down = LocalStore(tmp_path / "down")
    assert copy_all({key: Source(store, key) for key in objects}, down) == copies(objects, new=True)
    assert {key: down.read(key) for key in down.list()} == objects


def test_each_byte_goes_up_once_and_comes_back_once(store: S3Store, here: LocalStore, proxy: Proxy) -> None:
    store.create("first", b"")
    objects = {"long": LONG, **SHORT}
    work, size = filled(here, objects), sum(map(len, objects.values()))
    before = len(proxy.requests), proxy.received, proxy.sent
    copy_all(work, store)
    kinds = Counter(_kind(request) for request in proxy.requests[before[0] :])
    assert kinds == {"put": 40, "part": 3, "begin": 1, "end": 1, "head": 42, "get": 43 + 1}  # one finds nothing there
    heads = 3000 * sum(kinds.values())  # bytes of a request and an answer but their bodies, at most
    assert size <= proxy.received - before[1] < size + heads and size <= proxy.sent - before[2] < size + heads


def _kind(request: Request) -> str:
    kinds = (("part", part_puts), ("put", puts), ("end", completions), ("get", gets))
    found = next((name for name, is_it in kinds if is_it(request)), "")
    return found or ("head" if request.method == "HEAD" else "begin")


def test_what_is_there_is_compared_and_its_source_left_alone(store: S3Store, here: LocalStore) -> None:
    """Where it is known what the object must be; a few pieces are read before the target says that it has it."""
    data = os.urandom(MIB) * 80
    copy_all(filled(here, {"long": data}), store)
    read: list[int] = []

    class Counting(LocalStore):
        def read_range(self, key: str, start: int, length: int) -> bytes:
            read.append(start)
            return super().read_range(key, start, length)

    known = {"long": Source(Counting(here.root), "long", object_digest(data))}
    assert copy_all(known, store) == copies({"long": data}, new=False)
    assert len(read) <= 2 + READS


def test_a_gigabyte_within_bounded_memory(store: S3Store, here: LocalStore, tmp_path: Path) -> None:
    """Up and down beside another one, in a process of its own that tells how much more memory it took."""
    block = os.urandom(10**6)
    objects = {
        key: [block] * (size // len(block)) for key, size in (("first", 10**6), ("long", GB), ("other", GB // 10))
    }
    for key, blocks in objects.items():
        here.create(key, blocks)
    for source, target in ((here.uri, store.uri), (store.uri, (tmp_path / "down").as_uri())):
        command = [sys.executable, "-c", COPY, source, target, *objects]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        assert done["digests"] == {key: object_digest(blocks) for key, blocks in objects.items()}
        print(f"{source} to {target}: {done['room'] / MIB:.0f} MiB")
        assert 8 * MIB < done["room"] < ROOM


@pytest.mark.parametrize("key", ["objects/" + "a" * 64, "ledger/00000001.jsonl"])
@pytest.mark.parametrize("data", [b"short", LONG], ids=["short", "long"])
def test_what_is_not_what_it_must_be_never_appears(store: S3Store, here: LocalStore, key: str, data: bytes) -> None:
    here.create("first", b"")
    here.create(key, data)
    with pytest.raises(InputFault, match=object_digest(data)):
        copy_all({"first": Source(here, "first"), key: Source(here, key, "b" * 64)}, store)
    assert store.list() == ["first"]


@pytest.mark.parametrize("fault", [wrong_answer, nul_answer], ids=["wrong", "NUL"])
@pytest.mark.parametrize("data", [SHORT["ledger/00000000.jsonl"], LONG], ids=["short", "long"])
def test_what_reads_back_wrong_is_no_success(
    store: S3Store, here: LocalStore, proxy: Proxy, fault: Fault, data: bytes
) -> None:
    work = filled(here, {"first": b"1", "k": data})
    copy_all({"first": work["first"]}, store)

    def body(request: Request) -> bool:
        return gets(request) and request.headers["Range"] != "bytes=0-0"

    proxy.fault(fault, when=body)  # once: damaged on the way
    assert copy_all({"k": work["k"]}, store) == copies({"k": data}, new=True) and not proxy.faults_left
    proxy.fault(fault, when=body, times=999)
    with pytest.raises(
        InputFault, match=f"k is there already with other content: digest .*, expected {object_digest(data)}"
    ):
        copy_all({"k": work["k"]}, store)


def test_the_first_failure_ends_the_others(store: S3Store, here: LocalStore) -> None:
    """Objects are there wholly or not at all, nothing is sent any more, and the rest is made up by a second call."""
    objects = {"ledger/header.json": b"header", **SHORT, **{f"long/{number}": LONG for number in range(6)}}
    work = filled(here, objects)

    class Stopped(Exception):
        pass

    def stop(progress: PublishProgress) -> None:
        if progress.objects == 7:
            raise Stopped

    with pytest.raises(Stopped):
        copy_all(work, store, stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("copy", "read"))]
    there = store.list()
    assert 7 <= len(there) <= 7 + 2 * OBJECTS and all(store.read(key) == objects[key] for key in there)
    again = copy_all(work, store)
    assert {key for key, copy in again.items() if not copy.new} == set(there)
    assert {key: store.read(key) for key in store.list()} == objects


def test_the_first_is_alone(here: LocalStore) -> None:
    """It claims the target, so where it cannot be written nothing else is."""
    work = filled(here, {"header": b"ours", **SHORT})
    target = MemoryStore("claimed")
    target.create("header", b"another's")
    with pytest.raises(InputFault, match="header is there already with other content: digest of 9 bytes instead of 4"):
        copy_all(work, target)
    assert target.list() == ["header"]


def test_between_stores_in_memory() -> None:
    source, target = MemoryStore("source"), MemoryStore("target")
    assert copy_all(filled(source, {"long": LONG, **SHORT}), target) == copies({"long": LONG, **SHORT}, new=True)
    assert copy_all({}, target) == {}
