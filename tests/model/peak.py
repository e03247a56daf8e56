"""The memory that a piece of work really takes, measured in a process of its own.

python -m tests.model.peak PIECE RECOMPUTE HOLD [PROCESSES [in place]]    prints one JSON line: bytes at the peak

"training" is two steps of two units a process and, beside the second, the gathering of a checkpoint; peaks are added.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import kernels
from model.copying import Copier
from model.memory import MemoryPlan, Piece
from model.ranks import Ranks
from model.spec import NumericsSpec, RunSpec
from model.state import State, initial_state
from model.step import gradients, step
from tests.model import tiny

MID = {"vocab": 8192, "d_model": 512, "layers": 6, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1536}


def spec(units: int = 1) -> RunSpec:
    """27 million parameters; units of 4 windows of 1,024 tokens, so many to a step."""
    return tiny.spec(seq_len=1024, windows=4 * units, numerics=NumericsSpec(unit_windows=4), **MID)


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


def together(plan: MemoryPlan, processes: int) -> int:
    """The sum of the ranks' own peaks while they train."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_rank, args=(plan, processes, rank, Path(folder))) for rank in range(processes)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return sum(int((Path(folder) / f"{rank}.peak").read_text()) for rank in range(processes))


def _rank(plan: MemoryPlan, processes: int, rank: int, folder: Path) -> None:
    share = max(1, (os.cpu_count() or 1) // processes)
    torch.set_num_threads(share)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    for run in (tiny.spec(windows=4, numerics=NumericsSpec(unit_windows=2)), spec(2 * processes)):
        Path("/proc/self/clear_refs").write_text("5")
        _train(run, plan, rank)
    dist.destroy_process_group()
    (folder / f"{rank}.peak").write_text(str(peak()))


def _train(run: RunSpec, plan: MemoryPlan, rank: int) -> None:
    backend = kernels.backend("cpu")
    group, copier = Ranks(backend, run.model), Copier()
    whole = initial_state(run, backend) if rank == 0 else None
    for moment in (*whole.m.values(), *whole.v.values()) if whole else ():
        moment.fill(0)
    state = group.scattered(whole)
    del whole
    windows = tiny.windows(run, 0, run.schedule.phases[0].windows)
    step(run, backend, state, windows, memory=plan, group=group)
    if not plan.copy_state:
        group.gathered(state)
        step(run, backend, state, windows, memory=plan, group=group)
        return
    gathered: list[State | None] = []  # held for the whole of the step, as by a disk that is slow
    copy = copier.copy(state)
    gathering = threading.Thread(target=lambda: gathered.append(group.gathered(copy)))
    gathering.start()
    step(run, backend, state, windows, memory=plan, group=group)
    gathering.join()


def measure(plan: MemoryPlan, piece: Piece) -> int:
    """The process's peak in bytes while it does the piece; what compiling the kernels took is not counted."""
    work(tiny.spec(numerics=NumericsSpec(unit_windows=2)), plan, piece)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work(spec(), plan, piece)
    return peak()


def peak() -> int:
    """This process's peak in bytes since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    asked, recompute, hold, *ranks = sys.argv[1:]
    chosen = MemoryPlan(int(recompute), hold == "hold", copy_state="in place" not in ranks)
    found = together(chosen, int(ranks[0])) if ranks else measure(chosen, asked)  # type: ignore[arg-type]
    print(json.dumps(found))
