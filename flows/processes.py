"""The processes below this one, read from /proc: which they are, and how much memory they hold together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY = 1.0  # seconds between two readings


@dataclass(frozen=True)
class Process:
    """One process: its id, its parent's, resident memory in bytes, and its command line."""

    pid: int
    parent: int
    memory: int
    command: str


def family(root: int | None = None) -> list[Process]:
    """The process `root` (default: this one) and all that descend from it. Empty where there is no /proc."""
    everyone = list(_all())
    members = {root or os.getpid()}
    while more := {p.pid for p in everyone if p.parent in members} - members:
        members |= more
    return [process for process in everyone if process.pid in members]


def _all() -> Iterator[Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is being read
            # The second field, the name in brackets, may itself hold blanks and brackets.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield Process(int(folder.name), int(fields[1]), int(fields[21]) * PAGE, command)


class PeakMemory:
    """Watches the memory of the whole family from a thread; `gigabytes` is the largest sum seen (10^9 bytes).

    Pages that two of the processes share are counted in both, so the figure is an upper bound.
    """

    def __init__(self) -> None:
        self.gigabytes = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY):
            total = 0
            for process in family():
                total += process.memory
            self.gigabytes = max(self.gigabytes, total / 1e9)
