"""Memory of this machine: limits found, plans chosen or refused beforehand, moments in a file that vanishes."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kernels import reference
from model import device_memory, memory
from model.memory import KEEP_ALL, MemoryPlan
from storage import checkpoint
from storage import memory as machine
from storage.advance import advance
from storage.audit import replay
from storage.engine import load_backend
from storage.errors import Refused, StorageError
from storage.store import LocalStore, MemoryStore
from storage.training import resume, train_segment
from tests.model import tiny
from tests.model.recipes import run_spec
from tests.storage import small
from tests.storage.conftest import Small

MAPPED = MemoryPlan(recompute=1, hold_codes=False, map_moments=True)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_machine_memory_without_a_limit(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.machine_memory(tmp_path) == physical
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "max\n")
    assert machine.machine_memory(tmp_path) == physical
    assert 0 < machine.available() < machine.machine_memory() <= physical


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/a/b", "sys/fs/cgroup/a/b/memory.max"),
        ("0::/a/b", "sys/fs/cgroup/a/memory.max"),
        ("0::/", "sys/fs/cgroup/memory.max"),
        ("5:cpu:/x\n4:memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes"),
        ("4:memory:/not/visible/inside", "sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ],
)
def test_limit_of_a_control_group(tmp_path: Path, group: str, file: str) -> None:
    write(tmp_path, "proc/self/cgroup", group + "\n")
    write(tmp_path, file, "123456789\n")
    assert machine.machine_memory(tmp_path) == 123_456_789


@pytest.mark.parametrize("limit", ["", "max", "-1", "no number"])
@pytest.mark.parametrize("group", ["", "0:", "no group", "0::/a"])
def test_what_says_nothing_is_no_limit(tmp_path: Path, group: str, limit: str) -> None:
    write(tmp_path, "proc/self/cgroup", group + "\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", limit)
    assert machine.machine_memory(tmp_path) == machine.machine_memory(tmp_path / "nothing")


def test_a_control_group_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    group = os.fsdecode(b"caf\xe9")
    write(tmp_path, "proc/self/cgroup", "")
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    write(tmp_path, f"sys/fs/cgroup/{group}/memory.max", "123456789\n")
    assert machine.machine_memory(tmp_path) == 123_456_789


def test_too_little_memory_is_refused_with_both_numbers(begun: Small) -> None:
    need = memory.total(memory.needs(small.spec(), memory.leanest(small.spec(), "training"), "training"))
    for room, fits in ((need, True), (need - 1, False)):
        with mock.patch.object(machine, "available", return_value=room):
            assert [found.fits for found in machine.forecast(small.spec()) if found.piece == "training"] == [fits]
            if fits:
                assert machine.plan_for(small.spec(), "training").map_moments
                continue
            with pytest.raises(Refused, match=f"{need / 1e9:,.1f} GB.* offers {room / 1e9:,.1f} GB"):
                train_segment(begun.run(), "cpu", checkpoint_every=5, diagnostics_every=5)
    assert begun.store.list("segments/") == []


def test_room_for_a_copy_of_the_state_is_counted_and_given_up_first() -> None:
    run = small.spec()
    whole, copy = memory.total(memory.needs(run, KEEP_ALL, "training")), 12 * run.model.parameter_count()
    for room, waits in ((whole, False), (whole - 1, True), (whole - copy, True)):
        with mock.patch.object(machine, "available", return_value=room):
            plan = machine.plan_for(run, "training")
        assert plan == replace(KEEP_ALL, copy_state=not waits)
        assert ("training waits while a checkpoint is written" in str(plan)) == waits
    with mock.patch.object(machine, "available", return_value=whole - copy - 1):
        assert machine.plan_for(run, "training").slowdown() > plan.slowdown()
    for piece in ("unit", "step", "initial"):
        assert "copy" not in memory.needs(run, KEEP_ALL, piece)


def test_too_many_processes_are_refused_by_their_number() -> None:
    with mock.patch.object(machine, "available", return_value=10**10):
        machine.plan_for(small.spec(), "training", processes=2)
        with pytest.raises(Refused, match=r"GB by the leanest plan with 900 processes, .* offers 10\.0 GB") as caught:
            machine.plan_for(small.spec(), "training", processes=900)
    assert "smaller plan.processes" in caught.value.next_step


def test_a_device_s_memory_is_planned_by_its_own_counts() -> None:
    """Each of them too small by a byte is refused, with both numbers and by its name."""
    run = run_spec("open_1b")
    least, whole = (
        memory.total(device_memory.needs(run, plan, "training"))
        for plan in (memory.leanest(run, "training", device_memory.needs), KEEP_ALL)
    )
    beside = device_memory.on_host(run, "training")
    with mock.patch.object(machine, "available", return_value=beside):
        assert machine.plan_for(run, "training", device_of(whole)) == KEEP_ALL
        assert machine.plan_for(run, "training", device_of(whole - 1)).slowdown() > 1
        assert not machine.plan_for(run, "training", device_of(least)).map_moments
        with pytest.raises(Refused, match=rf"{least / 1e9:,.1f} GB of a GPU's memory .* this GPU offers") as caught:
            machine.plan_for(run, "training", device_of(least - 1))
        assert "--backend nvidia --recipe" in caught.value.next_step
        found = {f.piece: f for f in machine.forecast(run, device_of(whole))}["training"]
        assert found.fits and found.on_disk == 0 and found.document()["on_host"] == beside
    with mock.patch.object(machine, "available", return_value=beside - 1):
        with pytest.raises(Refused, match=f"{beside / 1e9:,.1f} GB of memory beside the GPU's, this machine offers"):
            machine.plan_for(run, "training", device_of(whole))
        assert not {f.piece: f for f in machine.forecast(run, device_of(whole))}["training"].fits


@pytest.mark.parametrize(
    ("size", "found"), [({"ffn": 16_385}, "ffn is 16,385"), ({"head_dim": 258}, "head_dim is 258"), ({}, "")]
)
def test_sizes_that_a_device_s_kernels_do_not_take_are_refused_first(size: dict[str, int], found: str) -> None:
    run, room = tiny.spec(**size), 10**12
    assert machine.plan_for(run, "training") and machine.forecast(run)
    if not found:
        assert machine.plan_for(run, "training", room) and machine.forecast(run, room)
        return
    for ask in (lambda: machine.plan_for(run, "step", room), lambda: machine.forecast(run, room)):
        with pytest.raises(Refused, match=found):
            ask()
    machine.plan_for(run, "initial", room)  # which torch draws


def device_of(room: int) -> int:
    """The free bytes of a device of which so many may be planned with."""
    return -(-room * machine.DEVICE_SHARE[1] // machine.DEVICE_SHARE[0])


def test_work_on_a_device_asks_for_its_memory_before_it_begins(made: Small, tmp_path: Path) -> None:
    with small.stand_in(), mock.patch.object(reference, "device_memory", return_value=10**8):
        with pytest.raises(Refused, match=r"training takes .* of a GPU's memory"):
            train_segment(made.run(), "any", checkpoint_every=5, diagnostics_every=5)
        with pytest.raises(Refused, match=r"training takes .* of a GPU's memory"):
            small.begin(tmp_path, MemoryStore("run"), MemoryStore("mix"))
        with pytest.raises(Refused, match=r"one step takes .* of a GPU's memory"):
            replay._replay(made.run(), 1, "any", lambda progress: None, None, None)
        with pytest.raises(Refused, match=r"initial weights takes .* of a GPU's memory"):
            replay._audit_initial(made.run(), "any", None)


def test_a_run_that_cannot_be_trained_here_is_not_begun(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    with small.stand_in(), mock.patch.object(machine, "available", return_value=10**8):
        with pytest.raises(Refused, match="training takes"):
            small.begin(tmp_path, store, LocalStore(tmp_path / "mix"))
    assert store.list() == []


def test_mapped_moments_are_the_same_state(made: Small, tmp_path: Path) -> None:
    run, before = made.run(), set(os.listdir(made.store.root))
    place = machine.moments(run.spec, MAPPED, made.store)
    state, expected = (checkpoint.load(made.store, run.ledger, 5, *args) for args in ([place], []))
    arrays = [*state.m.values(), *state.v.values()]
    assert all(type(a) is np.ndarray and a.flags.writeable and a.flags.c_contiguous for a in arrays)
    del place  # the arrays alone hold the file
    assert mapped_files(made.store.root) == 1 and set(os.listdir(made.store.root)) == before
    with small.stand_in():
        backend = load_backend("cpu")
        for _ in range(2):
            assert advance(run, backend, state).entry == advance(run, backend, expected).entry
    assert any(m.any() for m in state.m.values())
    del state, arrays
    assert mapped_files(made.store.root) == 0


def mapped_files(folder: Path) -> int:
    """How many files without a name this process maps from a folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith("(deleted)") and f"{folder}/" in line for line in lines)


def test_a_new_run_with_mapped_moments(begun: Small) -> None:
    run = begun.run()
    with small.stand_in():
        state = resume(run, load_backend("cpu"), MAPPED)
        assert mapped_files(begun.store.root) == 1 and not any(m.any() for m in state.m.values())
        plain = resume(run, load_backend("cpu"), MemoryPlan())
    assert {name: t.tobytes() for name, t in state.tensors().items()} == {
        name: t.tobytes() for name, t in plain.tensors().items()
    }


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        array = machine.moments(small.spec(), MAPPED, LocalStore(tmp_path))((300, 64))
        array[...] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_beforehand(tmp_path: Path) -> None:
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(StorageError, match=r"the moments' file .* No space left") as caught:
            machine.moments(small.spec(), MAPPED, LocalStore(tmp_path))
    assert caught.value.cause == "the disk is full"


def test_never_in_a_file_system_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.beside(LocalStore(tmp_path)) == tmp_path
    monkeypatch.setattr(machine, "_in_memory", lambda folder: folder == tmp_path)
    assert machine.beside(LocalStore(tmp_path)) != tmp_path
    assert machine.beside(MemoryStore("any")) == Path("/var/tmp")
    monkeypatch.setattr(machine, "_in_memory", lambda folder: True)
    with pytest.raises(StorageError, match="lie in memory"):
        machine.beside(LocalStore(tmp_path))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_what_lives_in_memory() -> None:
    assert machine._in_memory(Path("/dev/shm")) and not machine._in_memory(Path("/proc/self"))


def test_mounts_with_any_name(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(b"/dev/sda / ext4 rw 0 0\ntmpfs /a\\040b tmpfs rw 0 0\n/dev/sdb /caf\xe9\x0c ext4 rw 0 0\n")
    assert [machine._in_memory(Path(folder), mounts) for folder in ("/a b/c", "/a", "/")] == [True, False, False]
