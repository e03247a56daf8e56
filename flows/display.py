"""Progress for a person at a terminal: one bar per phase with the time left; plain lines where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from tasks.progress import Report, duration, listening

EVERY = 15.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def shown(console: Console) -> Iterator[None]:
    """Show every report of this process's tasks for as long as the block lasts."""
    show: _Bars | _Lines = _Bars(console) if console.is_terminal else _Lines(console)
    with show.bars if isinstance(show, _Bars) else contextlib.nullcontext(), listening(show):
        yield


class _Bars:
    def __init__(self, console: Console) -> None:
        count = TextColumn("{task.completed:>4.0f} of {task.total:.0f} {task.fields[unit]}")
        tail = [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[note]}")]
        name = TextColumn("{task.description:13}")
        bar = BarColumn(None, table_column=Column(max_width=24))  # the column that yields in a narrow terminal
        elapsed = TimeElapsedColumn(table_column=Column(no_wrap=True))
        self.bars = Progress(name, bar, count, elapsed, *tail, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, report: Report) -> None:
        left = "" if report.remaining is None or report.done >= report.total else f"{duration(report.remaining)} left"
        if report.phase not in self._tasks:
            self._tasks[report.phase] = self.bars.add_task(report.phase, total=report.total, unit="", left="", note="")
        self.bars.update(
            self._tasks[report.phase],
            total=report.total,
            completed=report.done,
            unit=report.unit,
            left=left,
            note=report.note,
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._next: dict[str, float] = {}

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        if report.done >= report.total or now >= self._next.get(report.phase, 0.0):
            self._next[report.phase] = now + EVERY
            self._console.print(f"{report.phase}: {report}", highlight=False)
