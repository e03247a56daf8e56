"""Processes that compile a device's kernels before its first self-test: all vectors between them, once, and no longer
than who asked for them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kernels import conformance, warm

TOTAL = len(conformance.vectors())


def backend(marker: Path | None, room: int = 100 << 30) -> ModuleType:
    found: Any = SimpleNamespace(NAME="reference", compiled=lambda: marker, device_memory=lambda: room)
    return found


def started(monkeypatch: pytest.MonkeyPatch, code: str) -> list[tuple[int, int]]:
    """Processes run `code` instead, told FIRST and EVERY; what was started."""
    parts: list[tuple[int, int]] = []

    def start(name: str, first: int, every: int, output: int) -> subprocess.Popen[bytes]:
        parts.append((first, every))
        command = [sys.executable, "-c", code, str(first), str(every)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)

    monkeypatch.setattr(warm, "_start", start)
    return parts


def test_a_process_computes_its_part_of_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    process = warm._start("cpu", 7, 80, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        assert output.read() == b"." * len(range(7, TOTAL, 80))
    assert process.wait() == 0
    process.communicate()


def test_the_parts_are_all_vectors_and_done_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"import sys; first, every = map(int, sys.argv[1:]); print(end='.' * len(range(first, {TOTAL}, every)))"
    parts, reports, marker = started(monkeypatch, code), list[tuple[int, int]](), tmp_path / "cache" / "made"
    warm.warm(backend(marker), 5, lambda done, of: reports.append((done, of)))
    assert parts == [(first, 5) for first in range(5)] and reports[-1] == (TOTAL, TOTAL)
    assert marker.exists()
    warm.warm(backend(marker), 5, lambda done, of: reports.append((done, of)))
    assert len(parts) == 5


def test_a_process_that_fails_leaves_it_to_the_self_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts, marker = started(monkeypatch, "import sys; sys.exit(sys.argv[1] == '1')"), tmp_path / "made"
    warm.warm(backend(marker), 3, lambda done, of: None)
    assert len(parts) == 3 and not marker.exists()


@pytest.mark.parametrize(("cores", "room", "count"), [(64, 100 << 30, 16), (64, 9 << 30, 4), (1, 100 << 30, 0)])
def test_no_more_than_cores_and_memory_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, room: int, count: int
) -> None:
    parts = started(monkeypatch, "")
    warm.warm(backend(tmp_path / "made", room), cores, lambda done, of: None)
    assert len(parts) == count


def test_a_backend_that_compiles_nothing_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = started(monkeypatch, "")
    warm.warm(backend(None), 8, lambda done, of: None)
    warm.warm(__import__("kernels").backend("cpu"), 8, lambda done, of: None)
    assert not parts


def test_they_end_with_whoever_asked() -> None:
    process = warm._start("reference", 0, 1, subprocess.DEVNULL)
    assert process.stdin is not None
    time.sleep(0.2)
    process.stdin.close()  # as where the parent was killed
    assert process.wait(30) == 1


def test_an_error_ends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, "import os, time; os.write(1, b'.'); time.sleep(60)")

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        warm.warm(backend(tmp_path / "made"), 2, stop)
    assert time.monotonic() - began < 30 and not (tmp_path / "made").exists()
