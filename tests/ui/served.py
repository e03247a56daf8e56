"""`make serve` in a process and a folder of its own, and its API, for tests that use the UI or kill something.

python -m tests.ui.served HOME PORT LOST_AFTER      what `make serve` runs, there
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flows.processes import Process, family
from flows.server import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 420.0  # seconds for anything: the machine may be busy
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
T = TypeVar("T")


def until(what: str, ask: Callable[[], T], limit: float = PATIENCE) -> T:
    """What `ask` answers, once it is not empty; the test fails after `limit` seconds."""
    end = time.monotonic() + limit
    while not (found := ask()):
        assert time.monotonic() < end, f"after {limit:.0f} s still not: {what}"
        time.sleep(0.2)
    return found


def call(api: str, method: str, path: str, body: Any = None) -> Any:
    """One request to a server's API; a busy one is asked again."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{api}{path}", method=method, data=data, headers={"Content-Type": "application/json"}
    )

    def ask() -> list[Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return [json.loads(answer.read() or b"null")]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        return []

    return until(f"{method} {path} is answered", ask)[0]


class Served:
    """A running `make serve`: its API at `url`, its processes below `process`."""

    def __init__(self, home: Path, lost_after: float = 60.0) -> None:
        self.home, self.port, self.lost_after = home, free_port(), lost_after
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Begin, or begin again in the same folder."""
        self.log = self.home / f"serve-{time.monotonic_ns()}.log"
        self.home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.ui.served", str(self.home), str(self.port), str(self.lost_after)]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=settings, start_new_session=True
            )
        until("the UI is served", lambda: self.process.poll() is not None or "UI: " in self.said())
        assert self.process.poll() is None, self.said()

    def said(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Seconds that it took to end."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        return time.monotonic() - began

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request to its API."""
        return call(f"{self.url}/api", method, path, body)

    def run(self, deployment: str, **parameters: Any) -> str:
        """Start a run of a deployment, "flow/name"; its id."""
        found = self.call("GET", f"/deployments/name/{deployment}")
        return str(self.call("POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, run: str) -> str:
        """RUNNING, COMPLETED, …"""
        return str(self.call("GET", f"/flow_runs/{run}")["state_type"])

    def finished(self, run: str) -> str:
        """The final state of a run, once it has one."""
        return until(f"run {run} ends", lambda: state if (state := self.state(run)) in FINAL else "")

    def artifacts(self, run: str) -> list[dict[str, Any]]:
        """Those of a run and of the runs within it."""
        runs = [run]
        for parent in runs:
            asked = {"flow_runs": {"parent_flow_run_id": {"any_": [parent]}}}
            runs += [child["id"] for child in self.call("POST", "/flow_runs/filter", asked)]
        return list(self.call("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": runs}}}))

    def processes(self, words: str) -> list[Process]:
        """Those below it whose command holds these words."""
        return [process for process in family(self.process.pid) if words in process.command]


def main() -> None:
    home, port, lost_after = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    from flows import serving

    os.environ["PREFECT_HOME"] = str(home)
    serving.serve(home, port, lost_after=lost_after)


if __name__ == "__main__":
    main()
