"""`make conformance`: the same bits under every instruction set, thread count and rounding mode of this machine.

Each row runs all vectors and a short trajectory in a process of its own. Rows that this machine cannot run print
"not run" and count as nothing. Exit code 1 on any difference, or when fewer than two rows ran.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900  # a row compiles every kernel anew for its instruction set


@dataclass(frozen=True)
class Row:
    """A setting: what it needs of the processor (a flag of /proc/cpuinfo, or nothing), and how it is forced."""

    name: str
    backend: str = "cpu"
    needs: str = ""
    isa: str = ""  # oneDNN
    core: str = ""  # OpenBLAS
    cpu: str = ""  # LLVM, for Numba
    threads: int = 2
    flush: bool = False

    def environment(self) -> dict[str, str]:
        """This process's, with the row's limits."""
        limits = {"ONEDNN_MAX_CPU_ISA": self.isa, "OPENBLAS_CORETYPE": self.core, "NUMBA_CPU_NAME": self.cpu}
        if self.cpu:
            limits["NUMBA_CPU_FEATURES"] = "+sse2"  # the named processor's own, not those that this one adds
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        numba = {"NUMBA_NUM_THREADS": str(min(self.threads, os.cpu_count() or 1))}
        return {**os.environ, "PYTHONPATH": str(ROOT), **threads, **numba, **{k: v for k, v in limits.items() if v}}


ROWS = (
    Row("reference", backend="reference"),
    Row("everything this machine has"),
    Row("one thread", threads=1),
    Row("subnormals flushed", flush=True),
    Row("AMX", needs="amx_int8", isa="AVX512_CORE_AMX", cpu="sapphirerapids"),
    Row("AVX-512 with VNNI, no AMX", needs="avx512_vnni", isa="AVX512_CORE_VNNI", cpu="cascadelake"),
    Row("AVX-512 without VNNI", needs="avx512bw", isa="AVX512_CORE", core="SkylakeX", cpu="skylake-avx512"),
    Row("AVX2", needs="avx2", isa="AVX2", core="Haswell", cpu="haswell"),
    Row("SSE4.1", needs="sse4_1", isa="SSE41", core="Nehalem", cpu="nehalem"),
    Row("torch operations alone", backend="generic:cpu"),
    Row("torch operations, one thread", backend="generic:cpu", threads=1),
    Row("torch on CUDA", backend="generic:cuda"),
    Row("torch on an Apple GPU", backend="generic:mps"),
)


def main() -> int:
    """Run every row that can run, print the table, return the exit code."""
    print(f"{'setting':30} {'vectors':9} {'trajectory root':18} {'seconds':>7}  products", flush=True)
    roots: set[str] = set()
    ran, differing = 0, 0
    for row in ROWS:
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
    equal = len(roots) == 1 and not differing and ran > 1
    print(f"{ran} rows ran; " + ("one trajectory root, every vector equal" if equal else "THEY DIFFER"))
    return 0 if equal else 1


def _missing(row: Row) -> str:
    """Why this machine cannot run the row; empty if it can."""
    if row.needs and row.needs not in _flags():
        return f"this processor has no {row.needs}"
    device = row.backend.partition(":")[2]
    if device == "cuda" and not torch.cuda.is_available():
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
    """The row's result; a row that dies counts as one difference, with the end of what it said."""
    command = [sys.executable, "-m", "tests.conformance.row", row.backend, str(row.threads)]
    command.append("flush" if row.flush else "keep")
    done = subprocess.run(command, cwd=ROOT, env=row.environment(), capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        said = f"the process ended with {done.returncode}: {done.stderr[-300:]}"
        return {"failing": [said], "trajectory": "none", "describe": {}}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    import flows  # noqa: F401  (importing it applies the environment)

    sys.exit(main())
