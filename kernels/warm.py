"""Before the first self-test of kernels that a device's compiler makes: several processes let it make them.

One after another they take minutes. Each process computes a part of the conformance vectors and drops what comes out,
so no bit depends on it; what stays is the compiler's cache, and the self-test computes every vector itself.

    python -m kernels.warm BACKEND FIRST EVERY    one process, told by warm(): a byte of output for each vector
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from kernels import backend, conformance
from kernels.conformance import Report

PROCESSES = 16
ROOM = 2 << 30  # bytes of the device's memory for each: the most that its driver and the vectors take
PROJECT = Path(__file__).resolve().parent.parent


def warm(module: ModuleType, cores: int, report: Report) -> None:
    """Let up to one process a core compute the vectors, unless this version's kernels were compiled on this machine.

    What fails in them is left for the self-test to find. report: vectors done so far, of how many.
    """
    made: Path | None = getattr(module, "compiled", lambda: None)()
    count = min(cores, PROCESSES, (module.device_memory() or 0) // ROOM)
    if made is None or made.exists() or count < 2:
        return
    if all(status == 0 for status in _compute(module.NAME, count, report)):
        with suppress(OSError):  # then the next process asks again
            made.parent.mkdir(parents=True, exist_ok=True)
            made.touch()


def _compute(name: str, count: int, report: Report) -> list[int]:
    """The processes' exit codes; they end when this one does."""
    done, total = 0, len(conformance.vectors())
    reading, writing = os.pipe()
    processes = []
    try:
        try:
            processes += [_start(name, first, count, writing) for first in range(count)]
        finally:
            os.close(writing)
        while data := os.read(reading, 1 << 10):  # until the last of them has ended
            done += len(data)
            report(done, total)
        return [process.wait() for process in processes]
    finally:
        os.close(reading)
        for process in processes:
            process.kill()
            process.communicate()


def _start(name: str, first: int, every: int, output: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kernels.warm", name, str(first), str(every)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, env=environment, cwd=PROJECT
    )


def main() -> None:
    """One process. Its parent holds the other end of standard input, which closes when the parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name, first, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no vector
    for _ in conformance.run(backend(name), first, every):
        os.write(output, b".")


def _end_with_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
