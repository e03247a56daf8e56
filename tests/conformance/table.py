"""The conformance table: rows, each a setting under which all vectors and a short trajectory run, and a verdict.

Rows that this machine cannot run print "not run" and count as nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance import emulation

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900  # a row compiles every kernel anew for its instruction set
SECONDS_EMULATED = 7200  # the compiler itself is emulated then
REPORT_SECONDS = 60  # how often a row that takes longer says so


@dataclass(frozen=True)
class Row:
    """A setting: what it needs of the processor (a flag of /proc/cpuinfo, or nothing), and how it is forced."""

    name: str
    backend: str = "cpu"
    needs: str = ""
    isa: str = ""  # oneDNN
    mkl: str = ""  # MKL, torch's BLAS, which obeys on Intel's processors alone
    aten: str = ""  # torch's own loops
    cpu: str = ""  # LLVM, for Numba
    threads: int = 2
    flush: bool = False
    emulated: bool = False  # on arm64

    def command(self) -> list[str]:
        """What prints the row's result as its last line."""
        python = emulation.command() if self.emulated else [sys.executable]
        arguments = [self.backend, str(self.threads), "flush" if self.flush else "keep"]
        return [*python, "-m", "tests.conformance.row", *arguments]

    def environment(self) -> dict[str, str]:
        """This process's, with the row's limits."""
        limits = {"ONEDNN_MAX_CPU_ISA": self.isa, "MKL_ENABLE_INSTRUCTIONS": self.mkl}
        limits |= {"ATEN_CPU_CAPABILITY": self.aten, "NUMBA_CPU_NAME": self.cpu}
        if self.cpu:
            limits["NUMBA_CPU_FEATURES"] = "+sse2"  # the named processor's own, not those that this one adds
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        numba = {"NUMBA_NUM_THREADS": str(min(self.threads, os.cpu_count() or 1))}
        outer = {**os.environ, "PYTHONPATH": str(ROOT), **threads, **numba, **{k: v for k, v in limits.items() if v}}
        return emulation.environment(outer) if self.emulated else outer


def show(rows: Sequence[Row]) -> int:
    """Run every row that can run, print the table; 1 on any difference or when fewer than two rows ran, else 0."""
    print(f"{'setting':30} {'vectors':9} {'trajectory root':18} {'seconds':>7}  products", flush=True)
    roots: set[str] = set()
    ran, differing = 0, 0
    for row in rows:
        if reason := _missing(row):
            print(f"{row.name:30} not run: {reason}", flush=True)
            continue
        began = time.monotonic()
        found = _run(row)
        ran += 1
        differing += bool(found["failing"])
        roots.add(str(found["trajectory"]))
        verdict = f"{len(found['failing'])} differ" if found["failing"] else "all equal"
        seconds, product = time.monotonic() - began, found["describe"].get("product", "")
        print(f"{row.name:30} {verdict:9} {found['trajectory'][:16]:18} {seconds:7.0f}  {product}", flush=True)
        for vector in found["failing"][:5]:
            print(f"    differs: {vector}")
    equal = len(roots) < 2 and not differing
    verdict = "one trajectory root, every vector equal" if equal else "THEY DIFFER"
    print(f"{ran} rows ran; " + (verdict if ran > 1 or not equal else "nothing was compared"))
    return 0 if equal and ran > 1 else 1


def _missing(row: Row) -> str:
    """Why this machine cannot run the row; empty if it can."""
    if row.emulated:
        return emulation.missing()
    if row.needs and row.needs not in _flags():
        return f"this processor has no {row.needs}"
    device = row.backend.partition(":")[2]
    if (device == "cuda" or row.backend == "nvidia") and not torch.cuda.is_available():
        return "no CUDA device"
    if device == "mps" and not torch.backends.mps.is_available():
        return "no Apple GPU"
    return ""


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _run(row: Row) -> dict[str, Any]:
    """The row's result; a row that dies or takes too long counts as one difference, with the end of what it said."""
    process = subprocess.Popen(
        row.command(), cwd=ROOT, env=row.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    limit = SECONDS_EMULATED if row.emulated else SECONDS
    for waited in range(0, limit, REPORT_SECONDS):
        try:
            said, errors = process.communicate(timeout=REPORT_SECONDS)
            break
        except subprocess.TimeoutExpired:
            print(f"    {row.name}: {waited + REPORT_SECONDS} s ...", file=sys.stderr, flush=True)
    else:
        process.kill()
        said, errors = process.communicate()
        errors += f"\nstopped after {limit} s"
    if process.returncode:
        reason = f"the process ended with {process.returncode}: {errors[-300:]}"
        return {"failing": [reason], "trajectory": "none", "describe": {}}
    return json.loads(said.splitlines()[-1])
