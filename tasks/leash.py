"""Run a module in a process that ends when its parent does: `python -m tasks.leash MODULE ARGUMENTS...`; or a script,
by another Python that knows nothing of this project: `python -I leash.py SCRIPT.py ARGUMENTS...`.

The parent holds the other end of this process's standard input. When the parent dies, however it dies, the pipe
closes; this process then asks itself to stop (SIGTERM), and is gone twenty seconds later at the latest.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

PATIENCE = 20.0  # seconds between asking and ending
# What torchrun tells its ranks and takes as options: a job around this command would be taken for the child's own.
OF_LAUNCHERS = re.compile(r"(PET|TORCHELASTIC)_.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")


def start(
    module: str,
    arguments: Sequence[str],
    output: int | IO[bytes],
    errors: int | IO[bytes] | None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start MODULE on a leash, as the leader of its own process group. The caller must keep the result alive."""
    return _start([sys.executable, "-m", "tasks.leash", module, *arguments], output, errors, env)


def start_script(
    python: Path,
    script: Path,
    arguments: Sequence[str],
    output: int | IO[bytes],
    errors: int | IO[bytes],
    env: dict[str, str],
) -> subprocess.Popen[bytes]:
    """The same for a script and the Python of another environment, which imports its own packages alone."""
    return _start([str(python), "-I", __file__, str(script), *arguments], output, errors, env)


def _start(
    command: list[str], output: int | IO[bytes], errors: int | IO[bytes] | None, env: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    project = str(Path(__file__).resolve().parent.parent)
    environment = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.fullmatch(name)} | (env or {})
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        env=environment,
        cwd=project,
    )


def stop(process: subprocess.Popen[bytes], patience: float = 20.0) -> int:
    """End the process and its whole group: politely first, then by force. Returns its exit status."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # everyone in the group is gone already
        os.killpg(group, number)


def _watch_parent() -> None:
    # os.read rather than sys.stdin: its lock would be held when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    _end()


def _end() -> None:
    """Ask this process to stop; be gone soon. The parent may have read what it writes to standard error, as nobody does
    now: a write must not fail while it saves its state."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


def end_with_parent() -> None:
    """For a process that torchrun starts, out of reach of its launcher's group: stop as above once that is gone."""
    threading.Thread(target=_watch_parent_id, args=(os.getppid(),), daemon=True).start()


def _watch_parent_id(parent: int) -> None:
    _outlive(parent)
    _end()


def vanish_with_parent() -> None:
    """For the process of a flow, which does not end with the worker that started it: be gone once that is. The children
    end by themselves, and the server, which hears no more of the run, gives it to another worker."""
    threading.Thread(target=_vanish, args=(os.getppid(),), daemon=True).start()


def _vanish(parent: int) -> None:
    _outlive(parent)
    os._exit(1)


def _outlive(parent: int) -> None:
    """Return once this process has another parent."""
    while os.getppid() == parent:
        time.sleep(0.5)


def main() -> None:
    """Watch the parent from a thread and run the module, or the script, as `__main__` in this one."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
