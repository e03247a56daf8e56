"""What one command takes: by a small process that starts it and waits for it alone.

Linux counts to a process's largest memory what its parent had when it started it, before the new program took the
place of the copy. So a command that a benchmark starts itself would seem as large as the benchmark is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_STARTS = """
import json, os, sys, time
began, child = time.monotonic(), os.fork()
if not child:
    os.close(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
_, status, used = os.wait4(child, 0)
clock = time.monotonic() - began
took = [os.waitstatus_to_exitcode(status), clock, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]
os.write(int(sys.argv[1]), json.dumps(took).encode())
"""


class Used(NamedTuple):
    """Exit status; seconds on the clock, and of the processor by the command and the processes it waited for; bytes of
    the largest one of them."""

    status: int
    clock: float
    processor: float
    memory: int


def run(arguments: Sequence[str], output: BinaryIO, folder: Path, variables: Mapping[str, str]) -> Used:
    """Run the command in a folder, its standard output to `output`; what it, and nothing else, used."""
    told, tell = os.pipe()
    with os.fdopen(told, "rb") as answer:
        try:
            starter = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _STARTS, str(tell), *arguments],
                stdout=output,
                cwd=folder,
                env=os.environ | dict(variables),
                pass_fds=[tell],
            )
        finally:
            os.close(tell)
        took = answer.read()
    if starter.wait() or not took:
        raise SystemExit(f"{' '.join(arguments)} could not be started")
    return Used(*json.loads(took))
