"""Segments of a real small run by torchrun's processes: resumed on other world sizes, stopped, killed; one head."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import checkpoint
from storage.run import Run, open_run
from storage.segment import SegmentEnd
from storage.store import LocalStore
from storage.stream import Stream
from tasks import leash, process
from tasks.process import ChildKilled, Event
from tests.storage import small
from tests.tasks.test_process import gone

Act = Callable[[int, list[int]], None]  # is given the launcher and its ranks, in order


class Trainer:
    """Starts segments and can reach their processes at a step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        monkeypatch.setenv("NUMBA_THREADING_LAYER", "workqueue")
        self.store, self.mix = LocalStore(folder / "run"), LocalStore(folder / "mix")
        self.children: list[subprocess.Popen[bytes]] = []
        start = leash.start

        def started(*arguments: Any) -> subprocess.Popen[bytes]:
            self.children.append(start(*arguments))
            return self.children[-1]

        monkeypatch.setattr(leash, "start", started)

    def run(self) -> Run:
        return open_run(self.store, Stream.open(self.mix))

    def train(
        self,
        processes: int,
        until: int = small.STEPS,
        at: int | None = None,
        act: Act | None = None,
        fault: Event | None = None,
    ) -> Event:
        def on_event(event: Event) -> None:
            if event["kind"] == "step" and event["step"] == at and act:
                launcher = self.children[-1].pid
                act(launcher, children(launcher))

        module = "tests.tasks.faulty" if fault else "tasks.segment"
        return process.run(module, self.request(processes, until) | {"fault": fault}, on_event, processes)

    def request(self, processes: int, until: int = small.STEPS) -> Event:
        return {
            "run": str(self.store.root),
            "mix": str(self.mix.root),
            "until": until,
            "backend": "cpu",
            "checkpoint_every": 4,
            "diagnostics_every": 4,
            "processes": processes,
        }

    def ends(self) -> list[SegmentEnd]:
        keys = [key for key in self.store.list("segments/") if key.endswith(".end.json")]
        return [SegmentEnd.parse(self.store.read(key), key) for key in keys]


def begin(folder: Path) -> None:
    """A new run, before its first step."""
    small.begin(folder, LocalStore(folder / "run"), LocalStore(folder / "mix"))


def children(pid: int) -> list[int]:
    """Processes that this one started, the oldest first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


@pytest.mark.slow
def test_segments_of_several_processes_that_are_stopped_and_killed_end_in_one_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    one, many = (Trainer(tmp_path / name, monkeypatch) for name in ("one", "many"))
    head = one.train(1)["head"]

    stopped = many.train(2, at=2, act=lambda launcher, ranks: os.kill(launcher, signal.SIGTERM))
    step = stopped["last_step"]
    assert stopped["outcome"] == "stopped" and 3 <= step < small.STEPS and step in checkpoint.steps(many.store)

    killed: list[Any] = []

    def kill(launcher: int, ranks: list[int]) -> None:
        os.kill(ranks[2], signal.SIGKILL)
        killed.extend([time.monotonic(), ranks])

    lost = r"another of the segment's 3 processes ended before its work was done: rank 2 \(process \d+\) has ended"
    with pytest.raises(ChildKilled, match=lost):
        many.train(3, at=step, act=kill)
    assert time.monotonic() - killed[0] < 15 and all(map(gone, killed[1]))
    assert any(end.outcome == "failed" and "another of the segment's 3" in end.reason for end in many.ends())

    ended = many.train(3)
    assert ended["outcome"] == "finished" and ended["head"] == head == many.run().ledger.head
    assert {key: many.store.read(key) for key in lasting(many)} == {key: one.store.read(key) for key in lasting(many)}


def lasting(made: Trainer) -> list[str]:
    """Ledger, digests, diagnostics and the last checkpoint with its probe: all that does not depend on the stops."""
    last = f"{small.STEPS:08d}.json"
    folders = ("digests/", "diagnostics/")
    return [
        key for key in made.store.list() if key.startswith(folders) or key in (f"checkpoints/{last}", f"probe/{last}")
    ]


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "one")
    trainer, ranks = Trainer(tmp_path / "one", monkeypatch), []

    def kill(launcher: int, found: list[int]) -> None:
        ranks.extend(found)
        os.kill(launcher, signal.SIGKILL)

    with pytest.raises(ChildKilled):
        trainer.train(2, at=1, act=kill)
    assert len(ranks) == 2 and all(map(gone, ranks))
    assert checkpoint.steps(trainer.store)[-1] <= len(trainer.run().ledger)
