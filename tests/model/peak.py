"""The memory that a piece of work really takes, measured in a process of its own.

python -m tests.model.peak PIECE RECOMPUTE HOLD     prints one JSON line: bytes at the peak
"""

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


def work(run: RunSpec, plan: MemoryPlan, piece: Piece) -> None:
    """A unit, or a step whose moments are as real as a checkpoint's."""
    backend = kernels.backend("cpu")
    state, windows = initial_state(run, backend), tiny.windows(run, 0, run.numerics.unit_windows)
    if piece == "unit":
        gradients(run, backend, state.weights, windows, plan)
        return
    for moment in (*state.m.values(), *state.v.values()):
        moment.fill(0)  # only what is written becomes real
    step(run, backend, state, windows, memory=plan)


def measure(plan: MemoryPlan, piece: Piece) -> int:
    """The process's peak in bytes while it does the piece; what compiling the kernels took is not counted."""
    work(tiny.spec(numerics=NumericsSpec(unit_windows=2)), plan, piece)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work(spec(), plan, piece)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    asked, recompute, hold = sys.argv[1:]
    print(json.dumps(measure(MemoryPlan(int(recompute), hold == "hold"), asked)))  # type: ignore[arg-type]
