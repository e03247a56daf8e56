"""One Prefect server and one small published run for all tests of the flows; commands run as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import server
from flows.processes import family
from storage.ledger import part_key
from tests.flows import tiny

ROOT = Path(__file__).resolve().parents[2]

Verbatim = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flows.cli", *map(str, arguments)]


def verbatim(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line and insist on its exit code."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # of kernels' tests
    done = subprocess.run(command(*arguments), cwd=ROOT, env=plain, capture_output=True, text=True, timeout=1200)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def result(*arguments: str | Path, expect: int = 0) -> Any:
    """The JSON that a command prints."""
    return json.loads(verbatim(*arguments, "--json", expect=expect).stdout)


def segment_processes(root: int) -> list[int]:
    """The training processes that descend from `root`."""
    return [process.pid for process in family(root) if "tasks.segment" in process.command]


def kill_after(run: Path, step: int, root: int) -> threading.Thread:
    """Kill the training process below `root` once the ledger holds the entry of `step`."""

    def strike() -> None:
        limit = time.monotonic() + 120
        while not (run / part_key(step)).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        for pid in segment_processes(root):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the tests' own; commands started by the tests find it in their environment."""
    home = tmp_path_factory.mktemp("prefect")
    before = os.environ["PREFECT_HOME"]
    try:
        with server.running(home) as url:
            yield url
    finally:
        os.environ["PREFECT_HOME"] = before


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def folder(api: str, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was prepared, trained with its second segment killed, and published."""
    folder = tmp_path_factory.mktemp("run")
    verbatim("prepare", recipe, "--folder", folder)
    train = subprocess.Popen(command("train", recipe, "--folder", folder, "--backend", "reference"), cwd=ROOT)
    kill_after(folder / "run", 5, train.pid)
    assert train.wait(480) == 0
    verbatim("publish", folder)
    return folder
