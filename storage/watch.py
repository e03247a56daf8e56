"""Ranks that hang: a stopped process, a device that does not answer. They keep their connections, so that others wait.

Each rank tells once a second, from a thread, how far it is; rank 0 listens to all, the others to rank 0. Missing is

    a rank that says nothing more at all
    a rank that is at its own part of a step, as it was when this one began to wait for it
    every rank, where all wait in one exchange that does not end

for longer than ten times what the slowest step took, or a quarter of an hour before one is known, since the first
compiles. Time is counted in this rank's own seconds awake: where all were stopped together, nobody is missing. Who is
found is ended, where that is on this machine, and so all others get an error at the exchange where they wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import TCPStore

from model.stage import STAGE, Stage
from storage import processes
from storage.processes import Process

SECOND = 1.0  # between two pulses
TIMES = 10  # a wait may take as long as that many of the slowest step seen
LEAST, FIRST = 30.0, 900.0  # seconds that a wait may take at least, and before a step is known
GRACE = 20  # seconds for this rank to find that another has ended
Pulse = dict[str, Any]


class Board(Protocol):
    """Where ranks leave their pulses."""

    def tell(self, rank: int, pulse: Pulse) -> None:
        """Leave this rank's newest pulse."""

    def heard(self, rank: int) -> Pulse | None:
        """A rank's newest pulse; None before the first."""


class LauncherBoard:
    """The store of the launcher, which lives as long as the ranks do, by a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))

    def tell(self, rank: int, pulse: Pulse) -> None:
        """Leave this rank's newest pulse."""
        self._store.set(f"pulse/{rank}", json.dumps(pulse))

    def heard(self, rank: int) -> Pulse | None:
        """A rank's newest pulse; None before the first."""
        key = f"pulse/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


@dataclass
class _Other:
    """What is known of another rank; silent and busy in seconds of ours: without a pulse, at its part while we wait."""

    pulse: Pulse | None = None
    silent: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0  # for the same exchange as long as we have


class Watch:
    """One rank's watch over others. give_up: ends this process with a reason, where ending them did not free it."""

    def __init__(
        self, rank: int, size: int, board: Board, give_up: Callable[[str], None], stage: Stage = STAGE
    ) -> None:
        self._rank, self._board, self._give_up, self._stage = rank, board, give_up, stage
        self._others = {other: _Other() for other in (range(1, size) if rank == 0 else (0,))}
        self._ticks, self._ours = 0, (-1, False)
        self._over = threading.Event()
        stage.ended = self.ended
        self._me = {"machine": processes.machine(), "process": [p.document() for p in processes.line(0)]}

    def watch(self) -> None:
        """Until over() or somebody is missing; for a thread."""
        missing: Sequence[int] = ()
        while not missing and not self._over.wait(SECOND):
            try:
                missing = self.tick()
            except (RuntimeError, ValueError):  # no word from the launcher: then nothing is known of anybody
                continue
        if missing:
            for rank in missing:
                self._end(rank)
            self._leave()

    def over(self) -> None:
        """This rank has done its part: nobody need hear of it any more."""
        self._over.set()
        with suppress(RuntimeError):  # the launcher may be gone
            self._board.tell(self._rank, self._pulse())

    def ended(self) -> str:
        """Which of the ranks that we listen to have ended, as far as this machine knows, within a second."""
        for _ in range(100):
            pids = {rank: pid for rank, other in self._others.items() if (pid := self._gone(other))}
            if pids:
                return "; ".join(f"rank {rank} (process {pid}) has ended" for rank, pid in pids.items())
            time.sleep(0.01)
        return ""

    def _gone(self, other: _Other) -> int:
        return next((victim.pid for victim in self._here(other) if processes.process(victim.pid) != victim), 0)

    def _here(self, other: _Other) -> list[Process]:
        """Another's process, if it is one of this machine."""
        pulse = other.pulse or {}
        known = pulse.get("machine") == self._me["machine"] != ""
        return [Process.model_validate(found) for found in pulse["process"]] if known else []

    def tick(self) -> Sequence[int]:
        """Tell how far we are, listen how far others are; the ranks that are missing, of which `missing` then tells."""
        self._ticks += 1
        stage, limit = self._stage, allowed(self._stage)
        waiting, self._ours, before = stage.waiting, (stage.meetings, stage.waiting), self._ours
        self._board.tell(self._rank, self._pulse())
        for rank, other in self._others.items():
            self._listen(rank, other, waiting and self._ours == before)
        if found := [rank for rank, other in self._others.items() if max(other.silent, other.busy) > limit]:
            stage.missing = self._told(found, limit)
        elif self._rank == 0 and stage.work and all(other.waiting > limit for other in self._others.values()):
            found = list(self._others)
            stage.missing = f"all ranks wait in one exchange that does not end; allowed {limit:.0f} s"
        return found

    def _pulse(self) -> Pulse:
        stage, last = self._stage, self._over.is_set()
        at = {"meetings": stage.meetings, "waiting": stage.waiting, "work": stage.work}
        return {"tick": self._ticks, "over": last, **at, **self._me}

    def _listen(self, rank: int, other: _Other, stayed: bool) -> None:
        """stayed: whether we wait, and where we did a second ago."""
        heard, before = self._board.heard(rank), other.pulse or {}
        other.pulse, now = heard, heard or {}
        same = all(now.get(what) == before.get(what) for what in ("meetings", "waiting", "work"))
        stayed = stayed and same and bool(now)
        other.silent = other.silent + SECOND if now.get("tick") == before.get("tick") and not now.get("over") else 0.0
        other.busy = other.busy + SECOND if stayed and now["work"] and not now["waiting"] else 0.0
        other.waiting = other.waiting + SECOND if stayed and now["waiting"] else 0.0

    def _told(self, found: Sequence[int], limit: float) -> str:
        each = []
        for rank in found:
            other = self._others[rank]
            pulse = other.pulse or {}
            pid = ", ".join(str(known["pid"]) for known in pulse.get("process", [])) or "unknown"
            what = f"silent for {other.silent:.0f} s" if other.silent > limit else f"{other.busy:.0f} s late"
            where = f"in its {pulse['work']}" if pulse.get("work") else "between steps" if pulse else "from the start"
            each.append(f"rank {rank} (process {pid}) is {what} {where}")
        return f"{'; '.join(each)}; allowed are {limit:.0f} s"

    def _end(self, rank: int) -> None:
        """End a rank's process, if it is one of this machine."""
        for victim in self._here(self._others[rank]):
            processes.end(victim)

    def _leave(self) -> None:
        """See that the main thread goes on, with an error; it may come to the exchange only now."""
        seconds, at = 0, -1
        while seconds < GRACE and not self._over.wait(SECOND):
            same = self._stage.waiting and self._stage.meetings == at
            seconds, at = seconds + 1 if same else 0, self._stage.meetings
        if not self._over.is_set():
            self._give_up(self._stage.missing)


def allowed(stage: Stage) -> float:
    """Seconds that a wait may take now."""
    work, paces = stage.work, dict(stage.paces)  # the main thread goes on meanwhile
    known = [paces[work]] if work in paces else [] if work else list(paces.values())
    return max(LEAST, TIMES * max(known) * stage.windows) if known else FIRST


@contextmanager
def watched(rank: int, size: int, launcher: tuple[str, int], give_up: Callable[[str], None]) -> Iterator[None]:
    """Around all that a rank does. launcher: its address and port; give_up: see Watch."""
    watch = Watch(rank, size, LauncherBoard(*launcher), give_up)
    thread = threading.Thread(target=watch.watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over()
        thread.join(2 * SECOND)
