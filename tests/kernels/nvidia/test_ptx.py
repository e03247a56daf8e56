"""The static check of the NVIDIA kernels' machine code sees what it must see; `make ptx` runs it on the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.kernels.nvidia.offences import KERNELS

ROOT = Path(__file__).resolve().parents[3]
# Kernel → a piece of each finding, in order.
EXPECTED = {
    "fused": ["may fuse", "fma.rn.f32"],
    "explicit_fma": ["fma.rn.f32"],
    "approximate_exp": ["ex2.approx.f32"],
    "approximate_division": ["div.full.f32"],
    "flushed_root": ["sqrt.rn.ftz.f32"],
    "double": ["cvt.f64.f32", "mul.rn.f64", "add.rn.f64", "cvt.rn.f32.f64"],
    "reduced": ["TTIR: tt.reduce by arith.addf"],
    "largest": ["TTIR: tt.reduce by arith.maxnumf"],
    "scanned": ["TTIR: tt.scan by arith.addf"],
    "multiplied": ["fma.rn.f32", "TTIR: tt.dot"],
    "added_atomically": ["add.f32", "TTIR: tt.atomic_rmw"],
    "carried_by_for": ["carried by a loop: arith.addf"],
    "carried_by_while": ["carried by a loop: arith.addf"],
    "carried_by_the_outer_loop": ["carried by a loop: arith.mulf"],
    "innocent": [],
}


@cache
def offences() -> dict[str, list[str]]:
    """Findings by kernel, from a process outside Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.nvidia.offences"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_offence_is_seen_and_nothing_else(name: str) -> None:
    found = offences()[name]
    assert len(found) == len(EXPECTED[name]), found
    assert all(piece in text for piece, text in zip(EXPECTED[name], found)), found


def test_every_offence_is_expected() -> None:
    assert {kernel.fn.__name__ for kernel in KERNELS} == EXPECTED.keys()
