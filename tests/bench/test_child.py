"""What a benchmark says of a command is the command's own."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from tests.bench import child

MB = 1 << 20


def used(tmp_path: Path, program: str) -> tuple[child.Used, bytes]:
    with TemporaryFile() as output:
        found = child.run([sys.executable, "-I", "-S", "-c", program], output, tmp_path, {"SAID": "so"})
        output.seek(0)
        return found, output.read()


def test_neither_the_parent_s_memory_nor_an_earlier_child_s_is_counted(tmp_path: Path) -> None:
    held = np.ones(400 * MB, np.uint8)
    large, _ = used(tmp_path, "print(len(b'x' * (300 << 20)))")
    small, said = used(tmp_path, "import os; print(os.environ['SAID'], os.getcwd())")
    assert large.memory > 300 * MB and small.memory < 100 * MB and held[-1] == 1
    assert said.decode().split() == ["so", str(tmp_path.resolve())] and small.status == 0


BUSY = """
import sys, time
while time.process_time() < 0.5: pass
sys.exit(7)
"""


def test_status_and_processor(tmp_path: Path) -> None:
    found, _ = used(tmp_path, BUSY)
    assert found.status == 7 and 0.5 <= found.processor < 5 and found.clock > 0.4


def test_a_command_that_is_not_there_ends_in_a_status(tmp_path: Path) -> None:
    with TemporaryFile() as output:
        assert child.run([str(tmp_path / "none")], output, tmp_path, {}).status
