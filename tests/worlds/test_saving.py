"""Ranks that gather a checkpoint in threads of their own, over connections of its own, while they do the next step."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import kernels
from model import schedule
from model.ranks import Ranks
from model.state import State, initial_state, root
from model.step import step
from storage.saving import Saver
from tests.model import tiny
from tests.worlds import world

PATIENCE = 120  # seconds until a test that waits has failed


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_gathered_while_steps_go_on_is_the_state_that_was_saved(size: int, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")  # a fork has the locks of thread pools that tests before have used
    ranks = [spawn.Process(target=_rank, args=(size, rank, tmp_path)) for rank in range(size)]
    limit = time.monotonic() + PATIENCE
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, limit - time.monotonic()))
        ended = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # one that waits for another would outlive the test
    assert ended == [0] * size
    roots, gathered = ((tmp_path / name).read_text().split() for name in ("roots", "gathered"))
    assert roots == gathered and len(set(roots)) == 3


def _rank(size: int, rank: int, folder: Path) -> None:
    """Three steps, each state saved; the last rank tells its rows only when the step after is done."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    run, backend = world.spec(), kernels.backend("cpu")
    group, stepped, gathered = Ranks(backend, run.model), threading.Event(), list[str]()

    def write(copy: State) -> None:
        if rank == size - 1:
            assert stepped.wait(PATIENCE)
        whole = group.gathered(copy)
        if whole is not None:
            gathered.append(root(whole)[0])

    state, roots = group.scattered(initial_state(run, backend) if rank == 0 else None), []
    with Saver(write, beside=True) as saver:
        for number in range(3):
            plan = schedule.plan(run, number)
            record = step(run, backend, state, tiny.windows(run, plan.first_window, plan.windows), group=group)
            stepped.set()
            saver.wait()
            stepped.clear()
            saver.save(state)
            roots.append(record.state)
        stepped.set()
    if rank == 0:
        (folder / "roots").write_text(" ".join(roots))
        (folder / "gathered").write_text(" ".join(gathered))
    dist.destroy_process_group()
