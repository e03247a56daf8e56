"""The memory that a piece of work really takes, measured in a process of its own.

python -m tests.model.peak PIECE RECOMPUTE HOLD     prints one JSON line: bytes beyond the program's own
"""

import gc
import json
import sys
from pathlib import Path

import kernels
from model.memory import MemoryPlan, Piece
from model.spec import NumericsSpec, RunSpec
from model.state import initial_state
from model.step import gradients, step
from tests.model import tiny

MID = {"vocab": 8192, "d_model": 512, "layers": 6, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1536}


def spec() -> RunSpec:
    """27 million parameters; units of 4 windows of 1,024 tokens, one unit to a step."""
    return tiny.spec(seq_len=1024, windows=4, numerics=NumericsSpec(unit_windows=4), **MID)


def status(name: str) -> int:
    """A figure of this process's memory, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def work(run: RunSpec, plan: MemoryPlan, piece: Piece) -> None:
    """Do a unit or a step from state 0."""
    backend = kernels.backend("cpu")
    state, windows = initial_state(run, backend), tiny.windows(run, 0, run.numerics.unit_windows)
    if piece == "unit":
        gradients(run, backend, state.weights, windows, plan)
    else:
        step(run, backend, state, windows, memory=plan)


def measure(plan: MemoryPlan, piece: Piece) -> int:
    """Peak bytes of the piece beyond what the process has once its kernels are loaded."""
    warm = tiny.spec(numerics=NumericsSpec(unit_windows=2))
    work(warm, plan, piece)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work(spec(), plan, piece)
    return status("VmHWM") - before


if __name__ == "__main__":
    asked, recompute, hold = sys.argv[1:]
    print(json.dumps(measure(MemoryPlan(int(recompute), hold == "hold"), asked)))  # type: ignore[arg-type]
