"""The store: whole or absent, never overwritten, no way out of its folder."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from storage.errors import InputFault, MissingObject, StorageError, UsageError, VerbatimError
from storage.store import LocalStore, MemoryStore, Store, create_same, object_digest, open_store


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return LocalStore(tmp_path / "store")
    return MemoryStore(f"test-{tmp_path}")


def test_create_read_list_delete(store: Store) -> None:
    assert store.list() == []
    assert store.create("ledger/00000002.jsonl", b"two")
    assert store.create("ledger/00000001.jsonl", b"one")
    assert store.create("z.json", b"")
    assert not store.create("ledger/00000001.jsonl", b"other")
    assert store.read("ledger/00000001.jsonl") == b"one"
    assert store.list() == ["ledger/00000001.jsonl", "ledger/00000002.jsonl", "z.json"]
    assert store.list("ledger/") == store.list("ledger") == store.list("ledger/0")
    assert store.list("ledger/00000002") == ["ledger/00000002.jsonl"]
    assert store.list("nothing/") == []
    assert (store.size("z.json"), store.size("ledger/00000001.jsonl")) == (0, 3)
    store.delete("z.json")
    store.delete("z.json")
    with pytest.raises(MissingObject):
        store.read("z.json")
    with pytest.raises(MissingObject):
        store.size("no/such/object")


def test_read_verifies(store: Store) -> None:
    store.create("a", b"0123456789")
    assert store.read("a", object_digest(b"0123456789")) == b"0123456789"
    wrong = object_digest(b"something else")
    with pytest.raises(InputFault, match=wrong) as caught:
        store.read("a", wrong)
    assert object_digest(b"0123456789") in str(caught.value)
    with pytest.raises(InputFault, match="at most 9"):
        store.read("a", limit=9)


def test_ranges(store: Store) -> None:
    store.create("a", b"0123456789")
    assert store.read_range("a", 3, 4) == b"3456"
    assert store.read_range("a", 10, 0) == b""
    for start, length in ((8, 3), (-1, 2), (2, -1), (11, 0)):
        with pytest.raises(InputFault):
            store.read_range("a", start, length)


BAD_KEYS = ["", "/etc/passwd", "../a", "a/../b", "a//b", "a/", "./a", ".tmp-1", "a/.hidden", "a\\b", "a\0b", "a b", "ä",
            "a\n", "C:/x", "x" * 201, "/".join(["xxxx"] * 200)]  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused(store: Store, key: str) -> None:
    for call in (lambda: store.create(key, b""), lambda: store.read(key), lambda: store.delete(key)):
        with pytest.raises(UsageError):
            call()
    assert store.list() == []


def test_create_same(store: Store) -> None:
    assert create_same(store, "a", b"x")
    assert not create_same(store, "a", b"x")
    with pytest.raises(InputFault, match="nothing was overwritten"):
        create_same(store, "a", b"y")
    assert store.read("a") == b"x"


def test_open_store(tmp_path: Path) -> None:
    by_path, by_uri = open_store(str(tmp_path / "a b")), open_store((tmp_path / "a b").as_uri())
    by_path.create("k", b"1")
    assert by_uri.read("k") == b"1" and by_path.uri == by_uri.uri
    open_store(f"memory://{tmp_path}").create("k", b"2")
    assert open_store(f"memory://{tmp_path}").read("k") == b"2"
    for uri in ("", "ftp://host/x", "file://host/x", "//[x", "http://[::1", "file:///a%00b"):
        with pytest.raises(UsageError):
            open_store(uri)


def test_links_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = LocalStore(tmp_path / "store")
    store.create("real/a", b"a")
    (store.root / "folder").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    os.mkfifo(store.root / "pipe")
    for key in ("folder/secret", "file", "pipe", "real"):
        with pytest.raises(InputFault):
            store.read(key)
    with pytest.raises(InputFault):
        store.create("folder/new", b"x")
    assert not store.create("file", b"x")
    assert (outside / "secret").read_bytes() == b"secret" and len(list(outside.iterdir())) == 1
    assert store.list() == ["real/a"] and store.list("folder/") == []


def test_leftovers_are_invisible_and_swept_unless_their_writer_lives(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dead, alive = tmp_path / ".tmp-1-abc", tmp_path / ".tmp-2-abc"
    dead.write_bytes(b"half")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert store.list() == [] and store.create("a", b"x")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-2-abc", "a"]


def _race(root: Path, start: "multiprocessing.synchronize.Event", results: "multiprocessing.Queue[int]") -> None:
    store = LocalStore(root)
    start.wait()
    results.put(sum(store.create(f"new/folder/{i}", b"%d" % os.getpid()) for i in range(50)))


def test_a_writer_killed_after_the_link_leaves_nothing_to_whoever_comes_next(tmp_path: Path) -> None:
    """The object is whole, so that nobody creates anything in its folder again."""
    LocalStore(tmp_path).create("a", b"1")
    os.link(tmp_path / "a", tmp_path / ".tmp-1-abc")
    assert not LocalStore(tmp_path).create("a", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_exactly_one_creator(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_race, args=(tmp_path, start, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    start.set()
    assert sum(results.get(timeout=30) for _ in workers) == 50
    for worker in workers:
        worker.join()
    assert len(LocalStore(tmp_path).list()) == 50
    assert not list(tmp_path.rglob(".tmp-*"))


def _python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])


KILLED = """
    import os, signal, sys
    import storage.local as module
    call = sys.argv[2]
    where, name = (module, call) if call.startswith("_") else (module.os, call)
    original, left = getattr(where, name), int(sys.argv[3])
    def killing(*args, **kwargs):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return original(*args, **kwargs)
    setattr(where, name, killing)
    module._WRITE_CHUNK = 1000
    module.LocalStore(module.Path(sys.argv[1])).create("a/b/object", bytes(range(250)) * 40)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("call", "count"),
    [("write", 0), ("write", 1), ("write", 5), ("write", 9), ("fsync", 0), ("fsync", 1), ("fsync", 2), ("fsync", 3),
     ("link", 0), ("unlink", 0), ("mkdir", 1)],
)  # fmt: skip
def test_killed_anywhere_whole_or_absent(tmp_path: Path, call: str, count: int) -> None:
    result = _python(KILLED, str(tmp_path), call, str(count))
    assert result.returncode == -signal.SIGKILL, result.stderr
    store, data = LocalStore(tmp_path), bytes(range(250)) * 40
    assert store.list() in ([], ["a/b/object"])
    linked = (call, count) in (("unlink", 0), ("fsync", 3))  # two folders and the file are synced before the link
    assert store.create("a/b/object", data) is not linked
    assert store.read("a/b/object") == data


FULL = """
    import resource, sys
    from storage.errors import VerbatimError
    from storage.local import LocalStore, Path
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if sys.argv[2] != "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    try:
        LocalStore(Path(sys.argv[1])).create("a/object", bytes(3_000_000))
    except VerbatimError as error:
        print(error)
        sys.exit(error.exit_code)
"""


def _nothing_left(folder: Path) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_file_size_limit(tmp_path: Path) -> None:
    result = _python(FULL, str(tmp_path), "1000000")
    assert result.returncode == 1 and "larger than the system's limit" in result.stdout
    _nothing_left(tmp_path)


def test_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small tmpfs; the file-size limit above takes the same path")
    try:
        result = _python(FULL, str(tmp_path), "0")
        assert result.returncode == 1 and "the disk is full" in result.stdout
        _nothing_left(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _create_as_nobody(root: str, answers: "multiprocessing.Queue[tuple[int, str]]") -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        LocalStore(Path(root)).create("a/object", b"x")
        answers.put((0, ""))
    except VerbatimError as error:
        answers.put((error.exit_code, str(error)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can go on as another user")
def test_no_permission() -> None:
    with tempfile.TemporaryDirectory(prefix="verbatim-") as folder:  # not tmp_path: its parents are closed to others
        os.chmod(folder, 0o755)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_create_as_nobody, args=(folder, answers))
        child.start()
        exit_code, message = answers.get(timeout=30)
        child.join()
        assert exit_code == 1 and "no permission" in message
        _nothing_left(Path(folder))


def test_no_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "link", denied)
    with pytest.raises(StorageError, match="Permission denied; nothing half-written"):
        LocalStore(tmp_path).create("a", b"x")
    _nothing_left(tmp_path)


@pytest.mark.parametrize(
    "address",
    ["https://user:canary@host/run", "S3://key:canary@bucket/run", "ftp://[canary@x", "gs://b/run?key=canary"],
)
def test_a_password_in_an_address_is_not_repeated(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(address)
    assert "canary" not in str(caught.value)
