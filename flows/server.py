"""A Prefect server of the project's own: on the loopback interface, with its own folder, ended by its process id.

`running()` lends a server for as long as a `with` block lasts; one that already serves the same folder is used instead,
since two servers must not share a database. Its history lies in SQLite in that folder, or in PostgreSQL, where
PREFECT_SERVER_DATABASE_CONNECTION_URL says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from flows import environment
from storage.errors import VerbatimError
from tasks import leash

# Who runs within a deployment's limit: kept in the server's folder, so that a server that restarts does not forget it.
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
AGAIN = 1.0  # seconds before a server that ended is followed by another
START_LIMIT = 300.0  # seconds; the first start creates the database, a busy machine takes minutes


@contextlib.contextmanager
def running(home: Path = environment.PREFECT_HOME, port: int | None = None) -> Iterator[str]:
    """Yield the API's URL, also set in PREFECT_API_URL, which Prefect reads when it is imported: enter this before."""
    previous = os.environ.get("PREFECT_API_URL")
    url = previous if previous and _healthy(previous) else _already_running(home)
    server = None
    if url is None:
        server = _Server(home, port or free_port())
        url = server.url
    os.environ |= {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
    try:
        yield url
    finally:
        if server is not None:
            _send_last_logs()
            server.stop()
        del os.environ["PREFECT_API_URL"]
        if previous is not None:
            os.environ["PREFECT_API_URL"] = previous


class _Server:
    """The server's process. One that is killed is followed by another at the same address, so that runs go on: whoever
    asks in the meantime asks again (PREFECT_CLIENT_MAX_RETRIES)."""

    def __init__(self, home: Path, port: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{port}/api"
        self._home, self._port, self._log = home, port, home / "server.log"
        self._stopped, self._lock = False, threading.Lock()
        self._process = self._launch()
        try:
            _wait(self._process, self.url, self._log)
        except BaseException:
            leash.stop(self._process)
            raise
        (home / "server.json").write_text(json.dumps({"url": self.url}))
        threading.Thread(target=self._keep, daemon=True).start()

    def stop(self) -> None:
        """End it for good."""
        with self._lock:
            self._stopped = True
            (self._home / "server.json").unlink(missing_ok=True)
            leash.stop(self._process, patience=10)  # a browser may keep a connection open

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "PREFECT_HOME": str(self._home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_UI_API_URL": self.url,
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(self._home / "ui"),
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        }
        arguments = ["--no-prompt", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as output:
            return leash.start("flows.prefect_cli", arguments, output, subprocess.STDOUT, settings)

    def _keep(self) -> None:
        while True:
            self._process.wait()
            time.sleep(AGAIN)
            with self._lock:
                if self._stopped:
                    return
                self._process = self._launch()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit = time.monotonic() + START_LIMIT
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > limit:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            state = "ended" if process.poll() is not None else f"did not answer within {START_LIMIT:.0f} s"
            raise VerbatimError(f"the Prefect server at {url} {state}; the end of {log}:\n{tail}")
        time.sleep(0.2)


def _send_last_logs() -> None:
    """Prefect sends logs from a thread; what it still holds must arrive before the server goes."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            handler.flush()


def _healthy(url: str) -> bool:
    try:
        # One that is not there refuses at once; on a busy machine one that is there takes its time.
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _already_running(home: Path) -> str | None:
    try:
        url = str(json.loads((home / "server.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        return None
    return url if _healthy(url) else None


def free_port(preferred: int = 0) -> int:
    """`preferred` if nobody listens there, else one that the system picks."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", preferred))
        return int(probe.getsockname()[1])
    return free_port()
