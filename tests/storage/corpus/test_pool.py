"""Processes that prepare a mix: any number gives the same bytes, and whatever ends one of them is one clear error."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.corpus import pool
from storage.corpus.manifest import KEY
from storage.corpus.pool import Done, processes
from storage.corpus.prepare import prepare
from storage.errors import InputFault, UsageError, VerbatimError
from storage.store import LocalStore
from tests.storage.corpus.mixes import prepared, small
from tests.storage.corpus.test_prepare import objects, store


@pytest.mark.parametrize("workers", [2, 5])
def test_the_number_of_workers_decides_nothing(tmp_path: Path, workers: int) -> None:
    whole, target = store(), LocalStore(tmp_path / "mix")
    spec, manifest = prepared(tmp_path, whole)
    with processes(workers) as run:
        assert prepare(spec, tmp_path, target, run=run, workers=workers, sort_bytes=50_000) == manifest
    assert {key: target.read(key) for key in target.list()} == objects(whole)


def test_the_first_error_of_a_worker_ends_all(tmp_path: Path) -> None:
    spec, target = small(tmp_path), LocalStore(tmp_path / "mix")
    (tmp_path / "rows.jsonl").write_bytes(b"{}")
    with pytest.raises(InputFault, match=r"rows\.jsonl differs from its pin") as error, processes(2) as run:
        prepare(spec, tmp_path, target, run=run, workers=2)
    assert "restore the pinned file" in error.value.next_step and target.list() == []


def test_a_lost_worker_is_one_clear_error_and_what_is_finished_is_kept(tmp_path: Path) -> None:
    spec, target = small(tmp_path), LocalStore(tmp_path / "mix")

    def killed(stage: str, jobs: Sequence[Any], done: Done) -> None:
        run(stage, [Suicide(job) if stage == "encode" else job for job in jobs], done)

    with pytest.raises(VerbatimError, match="was ended by someone else"), processes(2) as run:
        prepare(spec, tmp_path, target, run=killed, workers=2, sort_bytes=4000)
    told: list[tuple[str, int, int]] = []
    _, manifest = prepared(tmp_path / "other", store())
    assert prepare(spec, tmp_path, target, lambda *report: told.append(report)).root == manifest.root
    assert next(done for what, done, total in told if what == "read") > 0


def test_workers_that_are_gone_without_a_word_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that has not noticed is not waited for without end."""

    class Deaf(pool.ProcessPoolExecutor):
        def submit(self, *job: Any) -> Any:  # type: ignore[override]
            gone = multiprocessing.Process(target=print)
            gone.start()
            gone.join()
            self._processes = {gone.pid: gone}
            return Future()

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Deaf)
    monkeypatch.setattr(pool, "LOOK", 0.1)
    with pytest.raises(VerbatimError, match="was ended by someone else"), processes(2) as run:
        run("read", [Suicide(Sized()), Suicide(Sized())], lambda job: None)


class Sized:
    size = 1


@dataclass(frozen=True)
class Suicide:
    """A job in whose midst the process dies."""

    job: Any

    @property
    def size(self) -> int:
        return int(self.job.size)

    def __call__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_store_in_memory_is_of_one_process(tmp_path: Path) -> None:
    """Each worker would fill a copy of its own, and the manifest list what is nowhere."""
    spec, target = small(tmp_path), store()
    with pytest.raises(UsageError, match="is in the memory of one process") as error, processes(2) as run:
        prepare(spec, tmp_path, target, run=run, workers=2)
    assert error.value.next_step and KEY not in target.list()
