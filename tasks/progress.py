"""How far a task is: a progress artifact for the UI, and the same reports for whoever listens in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

LOGGED = 10.0  # seconds between two lines of the run's log that say the same
EVERY = 5.0  # seconds between two updates of the artifact: each is a request to the server


@dataclass(frozen=True)
class Report:
    """`done` of `total` `unit`s of a phase; `remaining` seconds at the pace so far, None before there is one.

    `note` is one short remark, such as the loss.
    """

    phase: str
    done: int
    total: int
    unit: str
    remaining: float | None
    note: str = ""

    def __str__(self) -> str:
        unknown = self.remaining is None or self.done >= self.total
        left = "" if unknown else f", about {duration(self.remaining or 0.0)} left"
        return f"{self.done:,} of {self.total:,} {self.unit}{left}" + (f"; {self.note}" if self.note else "")


_listeners: list[Callable[[Report], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[Report], None]) -> Iterator[None]:
    """Call `listener` with every report of this process, for as long as the block lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(report: Report) -> None:
    """Hand a report to whoever listens in this process."""
    for listener in _listeners:
        listener(report)


class Pace:
    """One phase's reports, with the time that is left, by the pace since the first report: what came before it, such as
    compiling, says nothing of it."""

    def __init__(self, phase: str, total: int, unit: str) -> None:
        self.phase, self.total, self.unit = phase, total, unit
        self._first: tuple[int, float] | None = None

    def report(self, done: int, note: str = "") -> Report:
        """How far it is with so many units done."""
        return Report(self.phase, done, self.total, self.unit, self._remaining(done), note)

    def _remaining(self, done: int) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        before, began = self._first
        return (now - began) / (done - before) * (self.total - done) if done > before else None


class Progress(Pace):
    """One phase's progress. Call it with the units done so far; the artifact is created by the first call."""

    def __init__(self, phase: str, key: str, total: int, unit: str) -> None:
        super().__init__(phase, total, unit)
        self.key = key
        self._sent = self._logged = 0.0
        self._artifact: UUID | None = None

    def __call__(self, done: int, note: str = "") -> None:
        report = self.report(done, note)
        tell(report)
        if done >= self.total or time.monotonic() - self._sent >= EVERY:
            self._send(report)

    def before(self, done: int, note: str) -> None:
        """Say what happens before the first unit; its time says nothing of the pace."""
        tell(Report(self.phase, done, self.total, self.unit, None, note))
        self._log(f"{self.phase}: {note}")

    def _send(self, report: Report) -> None:
        self._sent = time.monotonic()
        share = min(100.0, 100.0 * report.done / max(report.total, 1))
        text = f"{report.phase}: {report}"
        self._log(text, at_once=report.done >= report.total)
        with contextlib.suppress(httpx.HTTPError):  # a server that restarts just now ends no work
            self._update(share, text)

    def _log(self, text: str, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self._logged >= LOGGED:
            self._logged = time.monotonic()
            get_run_logger().info(text)

    def _update(self, share: float, text: str) -> None:
        if self._artifact is None:
            created = create_progress_artifact(share, key=self.key, description=text)
            assert isinstance(created, UUID)
            self._artifact = created
        else:
            update_progress_artifact(self._artifact, progress=share, description=text)


def duration(seconds: float) -> str:
    """`75` -> "1 min 15 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
