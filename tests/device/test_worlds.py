"""The check of several GPUs, done by processes: what it launches, compares and reads of NCCL's words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import launch, worlds

COMMITTED = [json.loads(line) for line in (worlds.ENTRIES / "small.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_record_that_differs_or_is_missing_is_found(tmp_path: Path) -> None:
    file = tmp_path / "found"
    assert worlds.differing(file, COMMITTED, 1, 3) == [(0, "steps instead of 2")]
    file.write_text("".join(json.dumps(record) + "\n" for record in COMMITTED[1:3]))
    assert worlds.differing(file, COMMITTED, 1, 3) == []
    file.write_text("".join(json.dumps(record | {"state": "00"}) + "\n" for record in COMMITTED[1:3]))
    assert worlds.differing(file, COMMITTED, 1, 3) == [(1, "state"), (2, "state")]


def test_numbers_of_gpus() -> None:
    assert [worlds.powers(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


def test_what_nccl_chose_is_counted(tmp_path: Path) -> None:
    lines = ["host:1:2 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}"] * 2
    lines += ["host:1:2 [0] NCCL INFO NCCL_ALGO set by environment to ring"]
    (tmp_path / "log").write_text("\n".join(lines))
    assert launch.algorithms([tmp_path / "log"]) == {"AllReduce TREE": 2}


@pytest.mark.slow
def test_processes_make_the_committed_records() -> None:
    command = [sys.executable, "-m", "tests.device.worlds", "small", "--backend", "cpu", "--gpus", "2", "--steps", "6"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "NUMBA_THREADING_LAYER": "workqueue"}
    done = subprocess.run(command, cwd=launch.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [part["gpus"] for part in json.loads(done.stdout.splitlines()[-1])["parts"]] == [1, 2, 2, 1]
