"""Where this process is in the work that a group does together: what its main thread is at, and how long it took.

    working("step", 12)     a work of all ranks, over 12 windows
      meeting()             in it, an exchange for which each rank waits until all others have come

Whoever watches for ranks that hang reads it from another thread (storage/watch.py), and who is slow is read from it at
the end of a segment. It changes nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stage:
    """meetings: to how many this rank has come; waiting: whether it is in one. work: "" between works. Seconds of
    steps but the first, which compiles: `waited` in meetings, `worked` outside, on `units`. turns: units of this work
    that are this rank's. torn: whether an error ended a work. missing: who was found to hang; ended: says, at an error,
    who has ended."""

    def __init__(self) -> None:
        self.meetings, self.waiting, self.work, self.windows = 0, False, "", 0
        self.waited = self.worked = 0.0
        self.units = self.turns = 0
        self.torn = False
        self.paces: dict[str, float] = {}  # the most seconds a window of what was done to its end, by work
        self.missing = ""
        self.ended: Callable[[], str] = str
        self._in_meetings = 0.0

    @contextmanager
    def working(self, work: str, windows: int = 1) -> Iterator[None]:
        """Around a work that all ranks do together. After an error this rank is out of it; others may not be."""
        began, before = time.perf_counter(), self._in_meetings
        self.work, self.windows = work, windows
        try:
            yield
        except BaseException:
            self.torn = True
            raise
        finally:
            self.work = ""
        taken, waited = time.perf_counter() - began, self._in_meetings - before
        if work == "step" and work in self.paces:
            self.waited, self.worked = self.waited + waited, self.worked + taken - waited
            self.units += self.turns
        self.paces[work] = max(self.paces.get(work, 0.0), taken / windows)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around an exchange; those of other threads are not the work's and don't count."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        began = time.perf_counter()
        self.meetings, self.waiting = self.meetings + 1, True
        try:
            yield
        finally:
            self.waiting = False
            self._in_meetings += time.perf_counter() - began


STAGE = Stage()  # of this process
