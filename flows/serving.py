"""`make serve`: the UI with the history of all runs, and a worker that starts what deployments/prefect.yaml declares.

Ctrl-C cancels what runs, waits until training has saved its state, and ends worker and server. If the worker is killed,
another is started; the run that it had is taken over once its heartbeat has been missing for as long as a lease lasts.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flows import environment, reports, server
from storage import lease
from storage.errors import VerbatimError
from tasks import leash

UI_PORT = 4200
QUERY = "2"  # seconds between two questions of the worker for something to do; Prefect's own are 10
LOST = lease.TERM + environment.HEARTBEAT
AGAIN = 5.0  # seconds before a worker that ended is followed by another


def serve(home: Path = environment.PREFECT_HOME, port: int = UI_PORT, lost_after: float = LOST) -> None:
    """Until SIGINT or SIGTERM. lost_after: seconds without a heartbeat after which a run is taken over."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _say("starting the server ...")
    with (
        _said("stopped"),
        reports.served(server.free_port(port + 1)) as pages,
        server.running(home, server.free_port(port)) as url,
        _said("stopping the server ..."),
    ):
        from flows import pool  # late: Prefect reads the server's address when it is imported

        pool.declare(lost_after)
        _say(f"UI: {url.removesuffix('/api')}  (deployments can be started there; Ctrl-C ends it)")
        while True:
            with _worker(home, pages) as worker:
                worker.wait()
            _say(f"the worker ended, see {home / 'worker.log'}; another is started")
            time.sleep(AGAIN)


@contextlib.contextmanager
def _worker(home: Path, pages: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker; when the block ends, all that it runs is cancelled before it is stopped."""
    from flows import pool
    from tasks.show import REPORTS

    with (home / "worker.log").open("ab") as log:
        arguments = ["--no-prompt", "worker", "start", "--pool", pool.NAME]
        settings = {"PREFECT_WORKER_QUERY_SECONDS": QUERY, REPORTS: pages}
        process = leash.start("prefect", arguments, log, subprocess.STDOUT, settings)
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                pool.cancel_all(_say)
                _say("stopping the worker ...")
        finally:
            leash.stop(process, patience=3)  # idle by now; asked once, it would wait for what it runs


@contextlib.contextmanager
def _said(text: str) -> Iterator[None]:
    try:
        yield
    finally:
        _say(text)


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Exit code 0 after Ctrl-C or SIGTERM."""
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve()
    except VerbatimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
