"""A Prefect server of the project's own: on the loopback interface, with its own folder, ended by its process id.

`running()` lends a server for as long as a `with` block lasts; one that already serves the same folder is used instead,
since two servers must not share a database. `make serve` (`python -m flows.server`) keeps one up for the UI, together
with a worker that runs what is started there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from flows import environment
from storage.errors import VerbatimError
from tasks import leash

UI_PORT = 4200
POOL = "verbatim-local"
START_LIMIT = 120.0  # seconds; the first start creates the database


@contextlib.contextmanager
def running(home: Path = environment.PREFECT_HOME, port: int | None = None) -> Iterator[str]:
    """Yield the API's URL, also set in PREFECT_API_URL, which Prefect reads when it is imported: enter this before."""
    previous = os.environ.get("PREFECT_API_URL")
    url = previous if previous and _healthy(previous) else _already_running(home)
    process = None
    if url is None:
        process, url = _start(home, port or _free_port())
    os.environ |= {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
    try:
        yield url
    finally:
        if process is not None:
            _send_last_logs()
            (home / "server.json").unlink(missing_ok=True)
            leash.stop(process)
        if previous is None:
            del os.environ["PREFECT_API_URL"]


def _start(home: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    home.mkdir(parents=True, exist_ok=True)
    root = f"http://127.0.0.1:{port}"
    url = f"{root}/api"
    settings = {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "PREFECT_SERVER_UI_API_URL": url}
    settings["PREFECT_SERVER_UI_STATIC_DIRECTORY"] = str(_first_ui_only(home / "ui"))
    log = home / "server.log"
    with log.open("wb") as output:
        arguments = ["--no-prompt", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        process = leash.start("prefect", arguments, output, subprocess.STDOUT, settings)
    try:
        _wait(process, url, log)
    except BaseException:
        leash.stop(process)
        raise
    (home / "server.json").write_text(json.dumps({"pid": process.pid, "url": url}))
    return process, url


def _first_ui_only(folder: Path) -> Path:
    """Where Prefect keeps the files of its UIs. No setting hides the second one, which fetches a configuration from
    another host; it is not offered if it cannot be put there: a link to nowhere stands in its place."""
    folder.mkdir(exist_ok=True)
    if not (folder / "v2").is_symlink():
        (folder / "v2").symlink_to("not-offered")
    return folder


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


def _free_port(preferred: int = 0) -> int:
    """`preferred` if nobody listens there, else one that the system picks."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", preferred))
        return int(probe.getsockname()[1])
    return _free_port()


def _prefect(*arguments: str) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=environment.PROJECT, capture_output=True, text=True)
    if done.returncode:
        raise VerbatimError(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


def serve() -> None:
    """The UI and one worker, until Ctrl-C: every deployment of deployments/prefect.yaml can be started from the UI."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running(port=_free_port(UI_PORT)) as url, contextlib.ExitStack() as stack:
        _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
        with (environment.PREFECT_HOME / "worker.log").open("wb") as log:
            arguments = ["--no-prompt", "worker", "start", "--pool", POOL]
            worker = leash.start("prefect", arguments, log, subprocess.STDOUT)
        stack.callback(leash.stop, worker)
        print(f"UI: {url.removesuffix('/api')}  (deployments can be started there; Ctrl-C ends it)", flush=True)
        worker.wait()


if __name__ == "__main__":
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve()
    except VerbatimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
