"""The memory that a piece of work really takes, measured in a process of its own.

python -m tests.model.peak PIECE RECOMPUTE HOLD REPLICAS     prints one JSON line: bytes at the peak
"""

import json
import sys
from pathlib import Path

import kernels
from model.memory import MemoryPlan, Piece
from model.spec import NumericsSpec, Ordered, RunSpec
from model.state import initial_state
from model.step import gradients, step
from tests.model import tiny

MID = {"vocab": 8192, "d_model": 512, "layers": 6, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1536}


def spec(replicas: int = 0) -> RunSpec:
    """27 million parameters; units of 4 windows of 1,024 tokens, one unit to a step. With replicas, two small units of
    each, whose gradients are added in order."""
    if not replicas:
        return tiny.spec(seq_len=1024, windows=4, numerics=NumericsSpec(unit_windows=4), **MID)
    reduction = Ordered(kind="ordered", replicas=replicas, shards=1, residual="left_fold")
    return tiny.spec(seq_len=128, windows=2 * replicas, numerics=NumericsSpec(reduction=reduction), **MID)


def work(run: RunSpec, plan: MemoryPlan, piece: Piece) -> None:
    """A unit, or a step whose moments are as real as a checkpoint's."""
    backend = kernels.backend("cpu")
    state, windows = initial_state(run, backend), tiny.windows(run, 0, run.schedule.phases[0].windows)
    if piece == "unit":
        gradients(run, backend, state.weights, windows, plan)
        return
    for moment in (*state.m.values(), *state.v.values()):
        moment.fill(0)  # only what is written becomes real
    step(run, backend, state, windows, memory=plan)


def measure(plan: MemoryPlan, piece: Piece, replicas: int) -> int:
    """The process's peak in bytes while it does the piece; what compiling the kernels took is not counted."""
    work(tiny.spec(numerics=NumericsSpec(unit_windows=2)), plan, piece)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work(spec(replicas), plan, piece)
    return peak()


def peak() -> int:
    """This process's peak in bytes since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    asked, recompute, hold, replicas = sys.argv[1:]
    found = measure(MemoryPlan(int(recompute), hold == "hold"), asked, int(replicas))  # type: ignore[arg-type]
    print(json.dumps(found))
