"""A variant of a preparation: under which circumstances it runs, in which processes, and what came out."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flows.processes import Process, family
from storage.store import LocalStore, object_digest
from tasks.references import CACHE
from tests.tasks.test_process import gone

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"
PATH = os.pathsep.join((str(INSIDE), str(ROOT)))
PLAIN = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONPATH": PATH}
TICK, GONE, STUCK = 0.2, 60.0, 120.0  # seconds: between two looks; for processes to end; without an end after a kill
TRIES = 8  # where kills came too late
FETCH, ENCODE = "fetch", "encode"  # stages: nothing is fetched, since all is in the cache; each job of it is a run

Victim = Literal["everything", "one worker", "the director"]


@dataclass(frozen=True)
class Variant:
    """workers, sort_mb: of `prepare`; variables: of its environment; kills: who is killed, in this order."""

    name: str
    workers: int = 2
    sort_mb: int = 512
    variables: Mapping[str, str] = field(default_factory=dict)
    kills: tuple[Victim, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Of the last call. objects: digests by key; stages: seconds of each; memory: of all processes together, bytes;
    runs: how many sorted runs of texts it made."""

    root: str
    objects: dict[str, str]
    stages: dict[str, float]
    memory: int
    runs: int = 0
    kills: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the whole call."""
        return sum(self.stages.values())


class Child:
    """`tests.corpus.one` in a session of its own."""

    def __init__(self, recipe: str, folder: Path, variant: Variant) -> None:
        command = [sys.executable, "-m", "tests.corpus.one", recipe, str(folder)]
        command += [str(variant.workers), str(variant.sort_mb)]
        self.log, self.at, self.root = folder / "log.txt", "", ""
        self.begun: dict[str, float] = {}  # when each stage was
        self.memory, self.runs, self._seen = 0, -1, set[int]()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | PLAIN | dict(variant.variables),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._hear, daemon=True)
        self._reader.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "at":
                self.at = rest
                stage = rest.rsplit(" ", 2)[0]
                self.begun.setdefault(stage, time.monotonic())
                self.runs += stage == ENCODE  # told at its beginning, and of each run
            elif word == "root":
                self.root = rest

    def stages(self) -> dict[str, float]:
        """Seconds from the beginning of each stage to that of the next; of the last, until now."""
        times = [*self.begun.values(), time.monotonic()]
        return {stage: end - begin for stage, begin, end in zip(self.begun, times, times[1:])}

    def reach(self, stage: str, seconds: float) -> bool:
        """Wait until the stage has gone on for so long; False if all ends before."""
        while stage not in self.begun:
            if self.wait(TICK / 10):
                return False
        return not self.wait(max(0.0, self.begun[stage] + seconds - time.monotonic()))

    def wait(self, seconds: float) -> bool:
        """Until it has ended, or for so long: whether it has ended. Notes its processes and their memory."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < limit:
            everyone = family(self.process.pid)
            self._seen |= {process.pid for process in everyone}
            self.memory = max(self.memory, sum(process.memory for process in everyone))
            time.sleep(max(0.0, min(TICK, limit - time.monotonic())))
        return self.process.poll() is not None

    def workers(self) -> list[Process]:
        """The processes that do its work: those below it that have none below themselves."""
        everyone = family(self.process.pid)
        self._seen |= {process.pid for process in everyone}
        parents = {process.parent for process in everyone} | {self.process.pid}
        return [p for p in everyone if p.pid not in parents and "resource_tracker" not in p.command]

    def kill(self) -> None:
        """Everything of it, at once."""
        self._seen |= {process.pid for process in family(self.process.pid)}
        os.killpg(self.process.pid, signal.SIGKILL)
        self.settle()

    def settle(self) -> None:
        """The process has ended or was killed: nothing of it may go on."""
        self.process.wait(GONE)
        for pid in self._seen:
            assert gone(pid, GONE), f"process {pid} goes on without the one that directs it"
        self._reader.join(GONE)

    def said(self) -> str:
        """The end of what it wrote on standard error."""
        return self.log.read_text(errors="replace")[-3000:]


class Scene:
    """A folder in which one variant is prepared."""

    def __init__(self, recipe: str, folder: Path, variant: Variant, draw: random.Random) -> None:
        self.recipe, self.folder, self.variant, self.draw = recipe, folder, variant, draw
        self._child: Child | None = None

    def go(self, stages: dict[str, float]) -> Outcome:
        """Prepare, with the kills that the variant has. stages: what an undisturbed call took, for their moments."""
        try:
            for _ in range(TRIES):
                self._empty()
                kills: list[str] = []
                if self._killed(stages, kills):
                    return self._to_the_end(tuple(kills))
        finally:
            if self._child and self._child.process.poll() is None:  # the tester was asked to stop
                self._child.kill()
        raise AssertionError(f"{TRIES} preparations ended before all kills of {self.variant.name!r} had landed")

    def _empty(self) -> None:
        """A folder with nothing but a cache of the downloads."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "cache").mkdir(parents=True)
        for path in (path for path in CACHE.iterdir() if path.is_file()):
            os.link(path, self.folder / "cache" / path.name)

    def _killed(self, stages: dict[str, float], kills: list[str]) -> bool:
        """Kill it in drawn stages, one after another, at drawn moments of them; False if it came to an end before."""
        names = [stage for stage in stages if stage != FETCH]
        drawn = sorted(self.draw.sample(range(len(names)), len(self.variant.kills)))
        for victim, stage in zip(self.variant.kills, (names[number] for number in drawn)):
            child = self._start()
            if not child.reach(stage, self.draw.random() * stages[stage]):
                child.settle()
                assert child.process.returncode == 0, child.said()
                return False
            seconds, where = child.stages(), child.at
            what = self._strike(child, victim)
            if not what:
                return False
            kills.append(f"{what} after {sum(seconds.values()):.1f} s, at {where!r}")
        return True

    def _strike(self, child: Child, victim: Victim) -> str:
        """Kill; what was done, or "" where there was no such process."""
        workers = child.workers()
        if victim == "everything" or (victim == "one worker" and not workers):
            child.kill()
            return "all killed" if victim == "everything" else ""
        os.kill(self.draw.choice(workers).pid if victim == "one worker" else child.process.pid, signal.SIGKILL)
        if not child.wait(STUCK):
            child.kill()
            raise AssertionError(f"{victim} was killed, and {STUCK:.0f} s later it had not ended: {child.said()}")
        child.settle()
        return f"{victim} killed (exit code {child.process.returncode})"

    def _start(self) -> Child:
        self._child = Child(self.recipe, self.folder, self.variant)
        return self._child

    def _to_the_end(self, kills: tuple[str, ...]) -> Outcome:
        child = self._start()
        while not child.wait(STUCK):
            pass
        stages = child.stages()
        child.settle()
        assert child.process.returncode == 0 and child.root, child.said()
        left = sorted(path.name for path in (self.folder / "cache").iterdir() if not (CACHE / path.name).is_file())
        assert not left, f"{left} are left in the cache, though the mix is finished"
        store = LocalStore(self.folder / "mix")
        objects = {key: object_digest(store.read(key)) for key in store.list()}
        return Outcome(child.root, objects, stages, child.memory, child.runs, kills)
