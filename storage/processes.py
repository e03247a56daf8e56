"""Processes of a machine, told apart from later ones with the same number: by when they were started."""

from __future__ import annotations

import os
import platform
import signal
from contextlib import suppress
from pathlib import Path

from storage.records import Count, Record

PROC = Path("/proc")


class Process(Record):
    """A process: its number and when it was started, in ticks since the machine was."""

    pid: Count
    started: Count


def machine() -> str:
    """A name for where process numbers mean the same: this start of this machine and this space of numbers. "" where
    the system does not say, so that nothing is known of anybody."""
    try:
        booted = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {booted} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def cores() -> int:
    """How many of the machine's this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process(pid: int) -> Process | None:
    """The process with this number; None where there is none that lives (a zombie does not), or no /proc."""
    fields = _stat(pid)
    return Process(pid=pid, started=int(fields[19])) if fields and fields[0] not in "ZX" else None


def line(generations: int) -> list[Process]:
    """This process and as many of its parents, itself first; shorter where one is gone."""
    pid, found = os.getpid(), []
    for _ in range(generations + 1):
        living = process(pid)
        if living is None:
            break
        found.append(living)
        pid = int(_stat(pid)[1])
    return found


def end(victim: Process) -> None:
    """End this very process, which may be stopped; no other that has its number now, and no error if it is gone."""
    if process(victim.pid) == victim:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """State, parent, … of a process: what stands behind its name, which may itself hold blanks and brackets."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
