"""Run one of the project's own modules in a process of its own and listen to what it reports.

The child writes one JSON object per line to its standard output: any number of events, and at the end
{"kind": "result", ...} or {"kind": "error", "message": ..., "exit_code": ...}. It is a child, not a thread, so that
it can be killed without harm, starts with clean memory and thread pools, and never outlives whoever asked for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from storage.errors import RankLost, VerbatimError, printable
from storage.processes import cores
from tasks import leash

Event = dict[str, Any]
SHUTDOWN = "--shutdown-timeout"  # seconds that torchrun gives ranks to stop
HERE, LOOP = "127.0.0.1", "lo"  # this machine's address for itself, and Linux' name of the interface that has it
LINES, LINE = 2000, 500  # of a child's standard error that a log is told at most, and characters of each
LINGER = 60.0  # seconds that a child which has told of its error may take to end


class ChildKilled(VerbatimError):
    """The child was ended by a signal that nobody here sent, a kill or the system out of memory; or one of its
    processes was, or hung."""


class ChildFailed(VerbatimError):
    """The child reported an error, which is passed on with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(
    module: str,
    request: Event,
    on_event: Callable[[Event], None] = lambda event: None,
    processes: int = 1,
    log: Callable[[str], None] | None = None,
) -> Event:
    """Run MODULE with `request` as its one argument (JSON); return its result event. Several processes are started by
    torchrun and share the machine's cores; the first error that one of them reports counts. log: is told, from a
    thread, what they write to standard error, which goes on to ours.

    Must be called in the main thread of a flow: a cancellation arrives there, as a BaseException, and ends the whole
    process group of the child before it goes on. Raises ChildKilled or ChildFailed.
    """
    child = _start(module, json.dumps(request), processes, subprocess.PIPE if log else None)
    if log:
        threading.Thread(target=_relay, args=(child, log), daemon=True).start()
    try:
        result = _listen(child, on_event)
        status = _ended(child, LINGER if result.get("kind") == "error" else None)
    except BaseException:
        leash.stop(child)
        raise
    leash.stop(child, patience=0)
    kind = result.get("kind")
    if kind == "result" and (not status or (processes > 1 and status > 0)):  # torchrun calls being asked a failure
        return result
    if result.get("killed"):
        raise ChildKilled(str(result["message"]))  # which says why
    if kind != "error" and (status < 0 or processes > 1):
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else _without_result(status)
        raise ChildKilled(
            f"{module} (process {child.pid}) {ended}",
            cause="someone killed it or one of its processes, or the system ran out of memory",
            next_step="start it again: it goes on from its newest whole checkpoint",
        )
    message = str(result.get("message", f"{module} {_without_result(status)}"))
    raise ChildFailed(message, int(result.get("exit_code", status or 1)))


def _without_result(status: int) -> str:
    return f"ended with exit code {status} and gave no result"


def _relay(child: subprocess.Popen[bytes], log: Callable[[str], None]) -> None:
    """Pass the child's lines on; a library that repeats itself without end is not repeated to the log."""
    assert child.stderr is not None
    for number, line in enumerate(child.stderr):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        if number < LINES and (text := printable(line.decode(errors="replace")[:LINE].rstrip())):
            log(text)


def _start(module: str, request: str, processes: int, errors: int | None) -> subprocess.Popen[bytes]:
    if processes == 1:
        return leash.start(module, [request], subprocess.PIPE, errors)
    from torch.distributed.run import get_args_parser  # late, since torch takes seconds to import

    loop = any(name == LOOP for _, name in socket.if_nameindex())
    threads = str(max(1, cores() // processes))
    # All on this machine: neither its name, which may not resolve, nor its networks, which may change, are asked for.
    arguments = ["--standalone", f"--local-addr={HERE}", f"--nproc-per-node={processes}"]
    if SHUTDOWN in get_args_parser().format_help():  # PyTorch 2.11 ends ranks half a minute after asking
        arguments.append(f"{SHUTDOWN}=86400")  # a rank that was asked to stop first ends its step, which may take long
    return leash.start(
        "torch.distributed.run",
        [*arguments, "-m", module, request],
        subprocess.PIPE,
        errors,
        {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads} | ({"GLOO_SOCKET_IFNAME": LOOP} if loop else {}),
    )


def _listen(child: subprocess.Popen[bytes], on_event: Callable[[Event], None]) -> Event:
    last: Event = {}
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith(b"\n"):  # else the child was killed in the middle of it
            last = json.loads(line)
            on_event(last)
            if last["kind"] == "error":
                break  # a process that cannot be ended may hold the pipe open
    return last


def _ended(child: subprocess.Popen[bytes], patience: float | None) -> int:
    """Its exit status, once it has ended or, after that many seconds, was ended."""
    try:
        return child.wait(patience)
    except subprocess.TimeoutExpired:
        return leash.stop(child)


def emit(kind: str, **fields: Any) -> None:
    """Report one event to the parent. If that is gone nobody listens, and the leash asks for a whole end: no error."""
    line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while line:  # a signal may cut one write short
            line = line[os.write(_REPORT, line) :]


# The descriptor that events go to; what a library prints goes to standard error instead, see `reporting`.
_REPORT = 1


@contextlib.contextmanager
def reporting() -> Iterator[Event]:
    """For a child's main: yields the request, keeps stray prints out of the events, reports an error as an event."""
    global _REPORT
    _REPORT = os.dup(1)
    os.dup2(2, 1)
    try:
        yield json.loads(sys.argv[1])
    except VerbatimError as error:
        emit("error", message=str(error), exit_code=error.exit_code, killed=isinstance(error, RankLost))
        sys.exit(error.exit_code)
    except Exception as error:
        emit("error", message=f"{type(error).__name__}: {error}", exit_code=1)
        raise
