"""The cache of remote stores: verified on every use, bounded, whole or absent, never in the way."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from storage.audit.keys import Key, load_or_create_key
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.cache import FOLDER, LIMIT_GB, Cache
from storage.errors import InputFault, UsageError
from storage.mirrors import Mirrors, bad_copies
from storage.store import MemoryStore, object_digest
from tests.storage.conftest import Small
from tests.storage.counting import Counting

LIMIT = 1 << 20
NAME = "ab" * 32


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", LIMIT)


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def remote(made: Small, name: str) -> Counting:
    """The release in a store that is not a folder here, which counts what is read of it."""
    store = MemoryStore(f"{name}-{made.folder}")
    for key in made.published.list():
        store.create(key, made.published.read(key))
    return Counting(store)


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


def test_what_was_put_is_there_until_it_is_dropped(cache: Cache) -> None:
    assert cache.get(NAME, 3) is None
    cache.put(NAME, b"abc")
    assert Cache(cache._folder, LIMIT).get(NAME, 3) == b"abc"
    cache.put(NAME, b"abd")
    assert cache.get(NAME, 3) == b"abd"
    assert cache.get(NAME, 4) is None and cache.get(NAME, 3) is None, "an entry of another length is none"
    cache.put(NAME, b"abc")
    cache.drop(NAME)
    cache.drop(NAME)
    assert cache.get(NAME, 3) is None


def test_nothing_but_a_file_is_an_entry(cache: Cache, tmp_path: Path) -> None:
    path = cache._folder / NAME[:2] / NAME
    path.parent.mkdir(parents=True)
    (tmp_path / "else").write_bytes(b"abc")
    path.symlink_to(tmp_path / "else")
    assert cache.get(NAME, 3) is None
    path.unlink()
    os.mkfifo(path)
    assert cache.get(NAME, 0) is None


def test_the_environment_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(LIMIT_GB, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = Cache.of_user()
    assert found and found._folder == tmp_path / ".cache" / "verbatim" and found._limit == 10**10
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(LIMIT_GB, "0.5")
    found = Cache.of_user()
    assert found and found._folder == tmp_path / "xdg" / "verbatim" and found._limit == 5 * 10**8
    monkeypatch.setenv(FOLDER, "")
    assert Cache.of_user() is None
    monkeypatch.setenv(LIMIT_GB, "much")
    with pytest.raises(UsageError, match="'much', not a number of gigabytes"):
        Cache.of_user()


def test_it_is_bounded_and_the_longest_unused_go_first(cache: Cache) -> None:
    size, kept = 20_000, [f"{i:064x}" for i in range(100)]
    for i, name in enumerate(kept):
        cache.put(name[::-1], bytes([i]) * size)
        os.utime(cache._path(name[::-1]), (1000 + i, 1000 + i))
        assert cache.get(kept[0][::-1], size) == bytes(size), "what is used stays"
        on_disk = sum(512 * path.stat().st_blocks for path in cache._folder.rglob("*") if path.is_file())
        assert on_disk <= LIMIT
    left = [name for name in kept if cache.get(name[::-1], size)]
    assert left[0] == kept[0] and left[1:] == kept[-len(left) + 1 :] and 30 < len(left) < 60
    cache.put(NAME, bytes(LIMIT))
    assert cache.get(NAME, LIMIT) is None, "what would leave no room for the rest is not kept"


def test_what_a_killed_writer_left_is_removed(cache: Cache) -> None:
    cache.put(NAME, b"abc")
    old, new = (cache._folder / NAME[:2] / f".tmp-{name}" for name in ("0" * 16, "1" * 16))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    Cache(cache._folder, LIMIT).put("cd" * 32, b"x")
    assert not old.exists() and new.exists() and cache.get(NAME, 3) == b"abc"


def _write_for_ever(folder: Path, seed: int) -> None:
    cache, draw = Cache(folder, LIMIT), np.random.default_rng(seed)
    while True:
        data = draw.bytes(int(draw.integers(1, 30_000)))
        cache.put(object_digest(data), data)


def test_writers_that_are_killed_leave_whole_entries_within_the_limit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(3):
        writers = [context.Process(target=_write_for_ever, args=(tmp_path, 10 * turn + i)) for i in range(4)]
        for writer in writers:
            writer.start()
        time.sleep(0.7)
        for writer in writers:
            assert writer.pid
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        found = {name: data for name, data in entries(tmp_path).items() if not name.startswith(".tmp-")}
        assert len(found) > 10 and all(object_digest(data) == name for name, data in found.items())
        assert sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*") if path.is_file()) <= LIMIT


@pytest.mark.parametrize("call", ["write_bytes", "mkdir"])
def test_a_full_disk_is_no_error(
    made: Small, auditor: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    cache = Cache(tmp_path / "cache", LIMIT)

    class Full(type(tmp_path)):  # type: ignore[misc]
        pass

    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, os.strerror(28))

    setattr(Full, call, full)
    cache._folder = Full(tmp_path / "cache")
    store = Mirrors([remote(made, call)], cache)
    assert audit_step(store, 8, "cpu", auditor).outcome is Outcome.MATCH
    assert entries(tmp_path / "cache") == {}


def test_a_second_audit_reads_hardly_anything(made: Small, auditor: Key, tmp_path: Path) -> None:
    """Header and RELEASE.json, by which everything else is verified; from whichever store, since names are digests."""
    first, second = remote(made, "a"), remote(made, "b")
    for store in (first, first, second):
        store.whole.clear()
        store.ranges.clear()
        verdict = audit_step(Mirrors([store], Cache(tmp_path / "cache", 100 * LIMIT)), 8, "cpu", auditor)
        assert verdict.outcome is Outcome.MATCH and verdict.bad_copies == ()
    assert set(second.whole) == {"ledger/header.json", "RELEASE.json"} and not second.ranges


def test_a_damaged_entry_is_fetched_again(made: Small, auditor: Key, tmp_path: Path) -> None:
    """What lies in the cache is verified at each use, and no store is blamed for it."""
    store, folder = remote(made, "c"), tmp_path / "cache"
    cache = Cache(folder, 100 * LIMIT)
    assert audit_step(Mirrors([store], cache), 8, "cpu", auditor).outcome is Outcome.MATCH
    good = entries(folder)
    assert len(good) > 20
    for name, data in good.items():
        cache.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    mirrors = Mirrors([store], cache)
    assert audit_step(mirrors, 8, "cpu", auditor).outcome is Outcome.MATCH and bad_copies(mirrors) == ()
    left = entries(folder)
    assert all(left[name] == good[name] for name in left)
    assert audit_step(Mirrors([store], cache), 8, "cpu", auditor).outcome is Outcome.MATCH
    assert entries(folder) == good


def test_nothing_that_is_not_sound_is_kept(made: Small, auditor: Key, tmp_path: Path) -> None:
    store = remote(made, "d")
    for key in store.list("objects/"):
        data = store.read(key)
        store.delete(key)
        store.create(key, data[:-1] + bytes([data[-1] ^ 1]))
    verdict = audit_step(Mirrors([store], Cache(tmp_path / "cache", 100 * LIMIT)), 8, "cpu", auditor)
    assert verdict.outcome is Outcome.INPUT_FAULT, verdict.detail
    wrong = {object_digest(store.read(key)) for key in store.list("objects/")}
    assert not wrong & {object_digest(data) for data in entries(tmp_path / "cache").values()}


def test_what_was_damaged_on_the_way_is_read_again(made: Small, auditor: Key, tmp_path: Path) -> None:
    class Noisy(Counting):
        """The first answer to each ranged read is wrong."""

        def read_range(self, key: str, start: int, length: int) -> bytes:
            data = super().read_range(key, start, length)
            first = self.seen.setdefault((key, start), len(self.seen))
            self.seen[key, start] = -1
            return data if first < 0 or not data else bytes([data[0] ^ 1]) + data[1:]

        seen: dict[tuple[str, int], int] = {}  # noqa: RUF012

    noisy = Noisy(remote(made, "e"))
    verdict = audit_step(Mirrors([noisy], Cache(tmp_path / "cache", 100 * LIMIT)), 8, "cpu", auditor)
    assert verdict.outcome is Outcome.MATCH and verdict.bad_copies == () and len(noisy.seen) > 3


def test_one_fault_is_raised_where_store_and_cache_are_bad(made: Small, tmp_path: Path) -> None:
    store, cache = remote(made, "f"), Cache(tmp_path / "cache", 100 * LIMIT)
    key = store.list("ledger/0")[0]
    Mirrors([store], cache).read(key)
    for name, data in entries(tmp_path / "cache").items():
        cache.put(name, bytes(len(data)))
    store.delete(key)
    store.create(key, bytes(made.published.size(key)))
    with pytest.raises(InputFault, match=f"{key} has digest"):
        Mirrors([store], cache).read(key)
    assert entries(tmp_path / "cache") == {}


def test_a_strangers_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    """Somebody may name a folder of their own."""
    own = [tmp_path / "my" / "thesis.tex", tmp_path / "ab" / "notes.txt"]
    for path in own:
        path.parent.mkdir()
        path.write_bytes(bytes(LIMIT))
    cache = Cache(tmp_path, LIMIT)
    cache.put(NAME, b"abc")
    assert all(path.exists() for path in own) and cache.get(NAME, 3) == b"abc"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", FOLDER, LIMIT_GB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it answers for an unknown user
    assert Cache.of_user() is None
