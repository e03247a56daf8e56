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
START_LIMIT = 300.0  # seconds; the first start creates the database, a busy machine takes minutes


@contextlib.contextmanager
def running(home: Path = environment.PREFECT_HOME, port: int | None = None) -> Iterator[str]:
    """Yield the API's URL, also set in PREFECT_API_URL, which Prefect reads when it is imported: enter this before."""
    previous = os.environ.get("PREFECT_API_URL")
    url = previous if previous and _healthy(previous) else _already_running(home)
    process = None
    if url is None:
        process, url = _start(home, port or free_port())
    os.environ |= {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
    try:
        yield url
    finally:
        if process is not None:
            _send_last_logs()
            (home / "server.json").unlink(missing_ok=True)
            leash.stop(process, patience=10)  # a browser may keep a connection open
        if previous is None:
            del os.environ["PREFECT_API_URL"]


def _start(home: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    home.mkdir(parents=True, exist_ok=True)
    root = f"http://127.0.0.1:{port}"
    url = f"{root}/api"
    settings = {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "PREFECT_SERVER_UI_API_URL": url}
    settings |= {
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
    }
    log = home / "server.log"
    with log.open("wb") as output:
        arguments = ["--no-prompt", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        process = leash.start("flows.first_ui", arguments, output, subprocess.STDOUT, settings)
    try:
        _wait(process, url, log)
    except BaseException:
        leash.stop(process)
        raise
    (home / "server.json").write_text(json.dumps({"pid": process.pid, "url": url}))
    return process, url


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
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
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
