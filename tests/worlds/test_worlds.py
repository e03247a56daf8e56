"""Worlds of processes in earnest, and who owns what in them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.digest import leaves
from model.rows import block_rows, idle, ownership
from model.spec import ModelSpec
from tests.model import tiny
from tests.worlds import world

ROOT = Path(__file__).resolve().parents[2]
TRAJECTORY = "dc78304f217e5207b8308d9e253bcd105cfcdf26a94bd40a406b056acf159815"  # of the twelve steps
RESUMED = "f61bc7bdaf96fad1e373b694620e8315ba9af2a5144fcd860895137fb3281f00"  # of thirty steps
WIDE = tiny.spec(vocab=2003, d_model=1000, layers=2).model  # leaves of an odd number of rows


@pytest.mark.parametrize("model", [world.spec().model, WIDE], ids=["world", "wide"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9, 64])
def test_every_row_has_one_owner_and_ranks_own_alike(model: ModelSpec, size: int) -> None:
    found, shapes = ownership(model, size), model.shapes()
    assert sorted(name for line in found.lines for name in line) == list(shapes)
    for name, spans in found.spans.items():
        assert [span.first for span in spans] == [0, *(span.last for span in spans[:-1])]
        assert spans[-1].last == shapes[name][0]
    for line in found.lines:
        owners = [span.rank for name in line for span in found.spans[name]]
        assert owners == sorted(owners)
        share = sum(math.prod(shapes[name]) for name in line) / size
        block = max(min(block_rows(shapes[name]), shapes[name][0]) * math.prod(shapes[name][1:]) for name in line)
        assert all(abs(count - share) <= block for count in found.elements(line))
    assert {name for rank in range(size) for name in found.own(rank)} == set(shapes)


def test_own_rows_are_whole_leaves_of_weights_and_gradients() -> None:
    for name, spans in ownership(WIDE, 3).spans.items():
        for dtype in (np.float32, np.int64):
            whole = np.arange(math.prod(WIDE.shapes()[name])).astype(dtype).reshape(WIDE.shapes()[name])
            assert b"".join(leaves(whole[span.first : span.last]) for span in spans) == leaves(whole)


def test_idle_turns() -> None:
    assert [idle(units, 4) for units in (1, 3, 4, 5, 8)] == [3, 1, 0, 3, 0]


@pytest.mark.slow
def test_worlds_of_one_two_and_three_give_one_trajectory() -> None:
    assert f"trajectory root {TRAJECTORY}" in report("tests.worlds.run", "--short")


@pytest.mark.slow
def test_a_run_resumed_at_every_step_on_another_world_size() -> None:
    assert f"trajectory root {RESUMED}" in report("tests.worlds.resume", "--short")


@pytest.mark.slow
@pytest.mark.timeout(900)  # 60 processes
def test_ranks_of_an_order_and_their_replay_give_one_trajectory() -> None:
    assert report("tests.worlds.ordered").count("equal") == 6


def report(*module: str) -> str:
    """What a module prints, which fails where anything differs; in a process of its own, since it forks."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "NUMBA_THREADING_LAYER": "workqueue"}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
