"""The memory that ranks really take while they train, the sum of their own peaks.

python -m tests.model.rank_peaks PROCESSES RECOMPUTE SAVING     prints one JSON line: bytes. SAVING: beside, or not

Two steps of two units a process and, beside the second, the gathering of a checkpoint.
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
from model.memory import MemoryPlan
from model.ranks import Ranks
from model.spec import NumericsSpec, RunSpec
from model.state import State, initial_state
from model.step import step
from tests.model import peak, tiny


def spec(processes: int) -> RunSpec:
    """27 million parameters; two units of 4 windows of 1,024 tokens a step and process."""
    return tiny.spec(seq_len=1024, windows=8 * processes, numerics=NumericsSpec(unit_windows=4), **peak.MID)


def together(plan: MemoryPlan, processes: int) -> int:
    """The sum of the ranks' peaks; what compiling the kernels took is not counted."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_rank, args=(plan, processes, rank, Path(folder))) for rank in range(processes)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return sum(int((Path(folder) / f"{rank}.peak").read_text()) for rank in range(processes))


def _rank(plan: MemoryPlan, processes: int, rank: int, folder: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    for run in (tiny.spec(windows=4, numerics=NumericsSpec(unit_windows=2)), spec(processes)):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        _train(run, plan, rank)
    dist.destroy_process_group()
    (folder / f"{rank}.peak").write_text(str(peak.peak()))


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


if __name__ == "__main__":
    size, recompute, saving = sys.argv[1:]
    print(json.dumps(together(MemoryPlan(int(recompute), copy_state=saving == "beside"), int(size))))
