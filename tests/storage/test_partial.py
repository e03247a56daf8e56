"""A replay that is stopped goes on from its last finished unit; a unit that is done again must come out the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import step, transformer
from storage import engine
from storage.audit import again, confirm, partial
from storage.audit.keys import Key, load_or_create_key
from storage.audit.open import open_step
from storage.audit.opening import load_opening
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.publish import publish
from storage.store import LocalStore, MemoryStore, Store
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.opened import drawn

SHARE = partial.SHARE  # as it is: tests that count what is kept set another
STEP, UNITS = 2, 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Three steps of a real model of four units each, with checkpoints 0, 2 and 3; published."""
    made = Small(tmp_path_factory.mktemp("partial"))
    phases = (small.Phase(from_tokens=0, windows=UNITS),)
    schedule = small.spec().schedule.model_copy(update={"phases": phases, "total_tokens": small.SEQ_LEN * UNITS * 3})
    small.begin(made.folder, made.store, made.mix, schedule=schedule)
    made.train(3, every=2)
    publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "self_test", lambda backend, report: None)
    monkeypatch.setattr(confirm, "repeat", again.found)
    monkeypatch.setattr(partial, "SHARE", 0)  # sums are kept after every unit, however slow the disk is


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def kept(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "audits")


class Stopped(BaseException):
    """The process ends here."""


def counted(monkeypatch: pytest.MonkeyPatch, stop_before: int | None = None) -> list[np.ndarray]:
    """The windows of each unit whose gradient is computed from now on; Stopped before number `stop_before`."""
    done: list[np.ndarray] = []
    original = transformer.unit_gradients

    def watched(net: Any, windows: np.ndarray, *rest: Any) -> Any:
        if len(done) == stop_before:
            raise Stopped
        done.append(windows)
        return original(net, windows, *rest)

    monkeypatch.setattr(step, "unit_gradients", watched)
    return done


def audited(made: Small, auditor: Key, kept: Store) -> Outcome:
    return audit_step(made.published, STEP, "cpu", auditor, kept=kept).outcome


@pytest.mark.parametrize("passes", range(UNITS + 1))
def test_it_goes_on_from_the_last_finished_unit(
    trained: Small, auditor: Key, kept: LocalStore, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit is done twice at first, so that n passes finish n − 1 units; nothing that was finished is done again."""
    before = counted(monkeypatch, stop_before=passes)
    with pytest.raises(Stopped):
        audited(trained, auditor, kept)
    monkeypatch.undo()
    monkeypatch.setattr(engine, "self_test", lambda backend, report: None)
    after = counted(monkeypatch)
    assert audited(trained, auditor, kept) is Outcome.MATCH
    finished = max(0, passes - 1)
    assert len(after) == UNITS - finished + (finished == 0)
    distinct = {windows.tobytes() for windows in [*before, *after]}
    assert len(distinct) == UNITS
    assert kept.list("partial/") == []


def test_the_unit_done_twice_is_any(trained: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = set()
    for unit in range(UNITS):
        monkeypatch.setattr(partial.secrets, "randbelow", lambda count, unit=unit: unit)
        with pytest.MonkeyPatch.context() as patch:
            done = counted(patch)
            assert audited(trained, auditor, MemoryStore(f"twice {unit}")) is Outcome.MATCH
        assert len(done) == UNITS + 1 and (done[0] == done[1]).all()
        chosen.add(done[0].tobytes())
    assert len(chosen) == UNITS


@pytest.mark.parametrize("what", ["gradient", "losses"])
def test_a_unit_that_comes_out_differently_is_a_machine_fault(
    trained: Small, auditor: Key, kept: LocalStore, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = iter(range(100)), transformer.unit_gradients

    def unsteady(net: Any, windows: np.ndarray, two_z: Any, sums: dict[str, Any], flag: Any) -> Any:
        nll, lse2 = original(net, windows, two_z, sums, flag)
        second = next(calls) == 1
        sums["blocks.000.q"][0, 0] += second and what == "gradient"
        return nll + (second and what == "losses"), lse2

    monkeypatch.setattr(step, "unit_gradients", unsteady)
    verdict = audit_step(trained.published, STEP, "cpu", auditor, kept=kept)
    assert (verdict.outcome, verdict.certificate) == (Outcome.MACHINE_FAULT, None)
    assert ("blocks.000.q" if what == "gradient" else "its losses") in verdict.detail


def stopped(made: Small, auditor: Key, kept: LocalStore) -> Path:
    """The sums that an audit left that was stopped before its last unit."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        counted(patch, stop_before=UNITS)
        audited(made, auditor, kept)
    (key,) = kept.list("partial/")
    return kept.path(key)


@pytest.mark.parametrize("position", [40, 1 << 15, (1 << 16) + 17, -1])
def test_damaged_sums_are_not_used(trained: Small, auditor: Key, kept: LocalStore, position: int) -> None:
    path = stopped(trained, auditor, kept)
    flip(path, position % path.stat().st_size)
    verdict = audit_step(trained.published, STEP, "cpu", auditor, kept=kept)
    assert verdict.exit_code == 11 and "partial/" in verdict.detail


def test_sums_of_another_step_are_not_found(trained: Small, auditor: Key, kept: LocalStore) -> None:
    stopped(trained, auditor, kept)
    assert audit_step(trained.published, 1, "cpu", auditor, kept=kept).outcome is Outcome.MATCH
    assert len(kept.list("partial/")) == 1


def test_saving_takes_a_tenth_of_the_time_at_most(
    trained: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that takes ten times as long as a unit, sums are written after the first unit and hardly again."""
    store, now, writes = MemoryStore("slow disk"), [0.0], list[str]()
    original = transformer.unit_gradients

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def create(self, key: str, data: Any) -> bool:
            now[0] += 10
            writes.append(key)
            return store.create(key, data)

    def timed(*arguments: Any) -> Any:
        now[0] += 1
        return original(*arguments)

    monkeypatch.setattr(partial, "SHARE", SHARE)
    monkeypatch.setattr(partial.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(step, "unit_gradients", timed)
    assert audited(trained, auditor, Slow()) is Outcome.MATCH
    assert len(writes) == 1


@pytest.mark.parametrize("passes", [1, 3, 4, 5, 7, 8])
def test_an_opening_goes_on_too(
    trained: Small, kept: LocalStore, tmp_path: Path, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four passes for the fingerprints, then the step's five."""
    shutil.copytree(trained.folder, tmp_path / "made")
    made = Small(tmp_path / "made")
    draw = drawn(made, count=3)
    counted(monkeypatch, stop_before=passes)
    with pytest.raises(Stopped):
        open_step(made.published, STEP, draw, "cpu", kept=kept)
    assert made.published.list("opened/openings/") == []
    after = counted(monkeypatch)
    open_step(made.published, STEP, draw, "cpu", kept=kept)
    finished = min(passes, 4) + max(0, passes - 5)
    assert len(after) == 2 * UNITS - finished + (passes < 6)
    assert len(load_opening(made.release(), STEP).opening.nll) == UNITS
