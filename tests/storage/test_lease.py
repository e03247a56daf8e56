"""Who trains a run, told to who would do the same work; seen to be over when its owner is gone, late or replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage import lease, processes
from storage.errors import InputFault, Refused, StorageError
from storage.lease import TERM, Holder, Lease, held
from storage.store import LocalStore, MemoryStore, Store

RUN = "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Puts the clock forward."""
    ahead, real = [0.0], time.time

    def forward(seconds: float) -> None:
        ahead[0] += seconds

    monkeypatch.setattr("storage.lease.time.time", lambda: real() + ahead[0])
    yield forward


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on this is another machine."""
    return lambda: monkeypatch.setattr(processes, "machine", lambda: "another machine")


def taken(store: Store, parents: int = 0) -> Lease:
    made = Lease(store, RUN, parents)
    made.take()
    return made


def newest(store: Store) -> Holder:
    key = store.list("lease/")[-1]
    return Holder.parse(store.read(key), key)


def child(work: Callable[[], object]) -> int:
    """A process that does the work and then sleeps; returns once the work is done."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os.write(writes, b".")
        time.sleep(60)
        os._exit(0)
    assert os.read(reads, 1)
    os.close(reads)
    os.close(writes)
    return pid


def test_a_second_trainer_is_told_by_whom_and_until_when(store: Store) -> None:
    before = time.time()
    with held(store, RUN, 1):
        with pytest.raises(Refused) as caught, held(store, RUN, 1):
            pass
        assert f"trained by process {os.getpid()} on {os.uname().nodename}, until 20" in str(caught.value)
        assert "train again" in caught.value.next_step and caught.value.exit_code == 13
        assert TERM - 1 <= newest(store).expires - before <= TERM + 2
    assert store.list("lease/") == []
    with held(store, RUN, 1):
        pass


@pytest.mark.parametrize("reaped", [True, False])
def test_an_owner_that_died_on_this_machine_is_seen_at_once(store: Store, reaped: bool) -> None:
    pid = child(lambda: taken(store))
    with pytest.raises(Refused, match=f"process {pid} "):
        taken(store)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    assert newest(store).processes[0].pid == pid
    taken(store)
    assert newest(store).processes[0].pid == os.getpid()
    if not reaped:
        os.waitpid(pid, 0)


def test_an_owner_whose_parent_died_is_ending_and_nobody_waits_for_it(store: Store, tmp_path: Path) -> None:
    """The flow was killed; the training process is about to notice."""
    note = tmp_path / "pid"
    parent = child(lambda: note.write_text(str(child(lambda: taken(store, parents=1)))))
    with pytest.raises(Refused, match=f"process {note.read_text()} "):
        taken(store)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert processes.process(int(note.read_text()))
    taken(store)
    os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_process_with_a_dead_owner_s_number_is_not_the_owner(store: Store) -> None:
    taken(store)
    holder = newest(store)
    mine = holder.processes[0]
    earlier = holder.model_copy(update={"processes": [mine.model_copy(update={"started": mine.started - 1})]})
    assert earlier.over(time.time()) and not holder.over(time.time())
    processes.end(earlier.processes[0])  # spares this process


def test_an_owner_elsewhere_is_waited_for_until_its_lease_expires(
    store: Store, clock: Callable[[float], None], elsewhere: Callable[[], None]
) -> None:
    pid = child(lambda: taken(store))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    elsewhere()
    with pytest.raises(Refused, match="until 20"):
        taken(store)
    clock(TERM + 1)
    taken(store)


def test_nothing_is_known_of_processes_where_the_system_does_not_tell_them_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path / "none")
    taken(store)
    assert newest(store).machine == "" and newest(store).processes == []
    with pytest.raises(Refused, match="process \\? on"):
        taken(store)


def test_renewing_holds_it_longer_and_leaves_one_object(store: Store, clock: Callable[[float], None]) -> None:
    owner = taken(store)
    for _ in range(3):
        clock(TERM / 2)
        owner.renew()
    assert store.list("lease/") == ["lease/00000004.json"] and owner.lost is None
    with pytest.raises(Refused):
        taken(store)
    owner.release()
    owner.renew()  # a thread that was about to
    assert store.list("lease/") == []


def test_it_is_renewed_from_a_thread_also_after_the_store_failed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.lease.EVERY", 0.01)
    create, failures = LocalStore.create, iter([False, True, True, False, *[False] * 10_000])

    def failing(self: Any, key: str, data: Any) -> bool:
        if next(failures):
            raise StorageError("the disk is full")
        return create(self, key, data)

    monkeypatch.setattr(LocalStore, "create", failing)
    with held(store, RUN, 0):
        limit = time.monotonic() + 20
        while store.list("lease/") in ([], ["lease/00000001.json"], ["lease/00000002.json"]):
            assert time.monotonic() < limit
            time.sleep(0.01)
    assert store.list("lease/") == []


def test_an_owner_that_slept_learns_who_took_it_over(store: Store, clock: Callable[[float], None]) -> None:
    slept = taken(store)
    clock(TERM + 1)
    other = taken(store)
    slept.renew()
    assert slept.lost == newest(store) and other.lost is None
    slept.release()
    other.renew()
    assert other.lost is None and len(store.list("lease/")) == 1


def test_an_owner_that_slept_goes_on_where_nobody_wanted_it(store: Store, clock: Callable[[float], None]) -> None:
    slept = taken(store)
    clock(TERM + 1)
    slept.renew()
    store.delete(store.list("lease/")[0])
    slept.renew()
    assert slept.lost is None and len(store.list("lease/")) == 1


def test_who_looked_before_an_owner_went_on_does_not_take_it(
    store: Store, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, looks, real = taken(store), iter([1]), lease._newest
    clock(TERM + 1)
    expired = newest(store)
    owner.renew()
    owner.renew()
    monkeypatch.setattr(lease, "_newest", lambda store: next(looks, None) or real(store))
    monkeypatch.setattr(lease, "_read", lambda store, number: expired if number == 1 else newest(store))
    with pytest.raises(Refused):
        taken(store)
    owner.renew()
    assert owner.lost is None


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_of_many_that_want_it_at_once_one_has_it(store: Store, kind: str, tmp_path: Path) -> None:
    place = store if kind == "file" else MemoryStore(str(tmp_path))
    won, gate = [], threading.Barrier(8)

    def want() -> None:
        gate.wait()
        try:
            won.append(taken(place))
        except Refused:
            pass

    for _ in range(10):
        threads = [threading.Thread(target=want) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won.pop().release()


def test_nobody_waits_for_what_cannot_be_read(store: Store) -> None:
    store.create("lease/00000007.json", b'{"kind":"lease","until":"tomorrow"}')
    taken(store)
    assert store.list("lease/") == ["lease/00000008.json"]


def test_an_owner_s_name_can_not_add_a_line_to_what_is_told(store: Store) -> None:
    held = Holder(run=RUN, host="a\n  next: evil", machine="", processes=[], token="", expires=2**36)
    store.create("lease/00000001.json", held.canonical())
    with pytest.raises(Refused, match=r"process \? on a\\n  next: evil, until"):
        taken(store)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_has_a_lease_s_name_and_is_none_does_not_hold_training_for_ever(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lease" / "00000001.json"
    path.parent.mkdir()
    path.mkdir() if kind == "folder" else path.symlink_to("nowhere")
    with pytest.raises(InputFault, match=r"lease/00000001\.json is there, but no owner is") as caught:
        taken(LocalStore(tmp_path))
    assert "delete its folder lease/" in caught.value.next_step


def test_a_number_beyond_all_others_is_told_or_no_lease(store: Store) -> None:
    """Its successor would be none that is found again: whoever wanted the run would look for it forever."""
    for odd in ("lease/100000000.json", "lease/999999999999999.json"):
        store.create(odd, b"{}")
    taken(store).release()
    store.create("lease/50000000.json", b"{}")  # half of them are left to whoever takes the last: it is renewed
    with pytest.raises(InputFault, match=r"lease/50000000\.json has the last number") as caught:
        taken(store)
    assert "delete its folder lease/" in caught.value.next_step
