"""Python imports this at the start of every process of a run under chaos: it says when a phase begins and ends.

The project's own modules run as they are; a function that is a phase's work is called through `_visit`, which tells the
tester, waits for its answer, and strikes inside the phase where the answer says so: before its n-th call.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Module → (function, phase of the run that it is the work of).
WORK = {
    "storage.training": (("resume", "resume"),),
    "storage.engine": (("step", "step"),),
    "model.group": (("Alone.digests", "digest"),),
    "model.ranks": (("Ranks.digests", "digest"),),
    "storage.ledger": (("Ledger.record", "record"),),
    "storage.checkpoint": (("save", "checkpoint"),),
    "storage.figures": (("save_probe", "probe"),),
    "storage.publish": (("publish", "publish"),),
}


class _Line:
    """The connection to the tester, opened by the first phase."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._answers = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self.say("hello", "", pid=os.getpid(), parent=os.getppid(), processes=int(os.environ.get("WORLD_SIZE", "1")))

    def say(self, event: str, phase: str, **fields: Any) -> dict[str, Any]:
        """Tell the tester; its answer where a phase begins, which must not pass another's in between."""
        line = json.dumps({"event": event, "phase": phase, "time": time.monotonic(), **fields}).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)
            return dict(json.loads(self._answers.readline())) if event == "enter" else {}


class _Calls:
    """Counts a thread's calls; before the one that is `limit`, ends the victim."""

    def __init__(self, line: _Line, phase: str, limit: int, victim: int) -> None:
        self.line, self.phase, self.limit, self.victim, self.count = line, phase, limit, victim, 0

    def __call__(self, frame: object, event: str, argument: object) -> None:
        self.count += 1
        if self.count == self.limit:
            os.kill(self.victim, signal.SIGKILL)
            self.line.say("struck", self.phase)  # said by others than the victim


_line: _Line | None = None
_opening = threading.Lock()


def _connected() -> _Line:
    global _line
    with _opening:
        _line = _line or _Line(os.environ["CHAOS_SOCKET"])
    return _line


def _visit(work: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(work)
    def visited(*arguments: Any, **options: Any) -> Any:
        line = _connected()
        answer = line.say("enter", phase)
        before = sys.getprofile()
        calls = _Calls(line, phase, answer.get("calls", 0), answer.get("victim", 0)) if answer else None
        if calls:
            sys.setprofile(calls)
        try:
            return work(*arguments, **options)
        finally:
            if calls:
                sys.setprofile(before)
            line.say("leave", phase, calls=calls.count if calls else 0)

    return visited


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of WORK as anyone does, and lets a loader of ours run them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in WORK else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(name, spec.origin or "")
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for path, phase in WORK[module.__name__]:
            *holders, name = path.split(".")
            holder = functools.reduce(getattr, holders, module)
            setattr(holder, name, _visit(getattr(holder, name), phase))


if "CHAOS_SOCKET" in os.environ and os.environ.get("RANK", "0") == "0":  # rank 0 speaks for the segment
    sys.meta_path.insert(0, _Finder())
