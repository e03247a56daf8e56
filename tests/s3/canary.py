"""Looks for secrets wherever a command may have left them: output, files, the Prefect server, lists of processes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flows.processes import family
from tests.flows.conftest import ROOT

EVERY = 0.01  # seconds between two looks at the list of processes
LAST_ERROR = ROOT / "runs/last-error.txt"
PAGE, PATIENCE = 200, 600  # rows of one answer; seconds


def forms(secret: str) -> set[bytes]:
    """How the middle of a secret looks in plain text, quoted, in hex, and in base64 at any offset."""
    middle = secret[len(secret) // 4 : -len(secret) // 4].encode()
    encoded = {base64.b64encode(b"\0" * skip + middle)[(skip * 8 + 5) // 6 :].rstrip(b"=")[:-1] for skip in range(3)}
    return {middle, quote(middle).encode(), middle.hex().encode(), *encoded}


@dataclass
class Search:
    """What was found; `places` counts what was looked through, so that nothing found means something."""

    secrets: list[str]
    found: list[str] = field(default_factory=list)
    places: int = 0

    def __post_init__(self) -> None:
        self._forms = {form for secret in self.secrets for form in forms(secret)}

    def look(self, where: str, data: bytes | str) -> None:
        text = data.encode(errors="surrogateescape") if isinstance(data, str) else data
        self.places += 1
        self.found += [f"{where}: {form!r}" for form in self._forms if form in text]

    def folder(self, folder: Path) -> None:
        """Every file below it, names too; databases and pickles as they lie there."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.look(f"the name {path}", os.fsencode(path))
            self.look(str(path), path.read_bytes())

    def api(self, url: str) -> None:
        """All that the Prefect server tells: runs with their parameters, logs, artifacts, states."""
        for what in ("flow_runs", "task_runs", "logs", "artifacts", "deployments", "events"):
            for start in range(0, 10**6, PAGE):
                answer = _asked(url, what, start)
                self.look(f"{what} from {start}", json.dumps(answer, ensure_ascii=False))
                if len(answer) < PAGE:
                    break


def _asked(url: str, what: str, start: int) -> Any:
    body = {} if what == "events" else {"limit": PAGE, "offset": start}
    request = urllib.request.Request(
        f"{url}/{what}/filter", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    return found["events"] if what == "events" else found


def watched(
    command: list[str], search: Search, environment: dict[str, str], interrupt: int = 0, after: float = 0
) -> tuple[int, str]:
    """Run it, look at its command lines all the while and at its output and the file of its last error afterwards.

    interrupt: a signal that it gets `after` so many seconds. Returns (exit code, standard error).
    """
    LAST_ERROR.unlink(missing_ok=True)
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe)
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not over.wait(EVERY):
            seen.update(process.command for process in family(child.pid))
            if interrupt and time.monotonic() - began > after and child.poll() is None:
                child.send_signal(interrupt)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        output, errors = child.communicate(timeout=PATIENCE)
    finally:
        over.set()
        watcher.join()
    typed = " ".join(command)
    for line in seen:
        if line.strip() != typed:  # what a person types is there for all to see, whatever we do
            search.look(f"a command line of {typed}", line)
    search.look(f"output of {typed}", output)
    search.look(f"errors of {typed}", errors)
    if LAST_ERROR.exists():
        search.look(f"{LAST_ERROR} of {typed}", LAST_ERROR.read_bytes())
    return child.returncode, errors.decode(errors="replace")
