"""A run of 30 steps, resumed at every step by another number of processes; it must come to one ledger.

    python -m tests.worlds.resume [--short]

One process trains the run. Then it is trained again in 30 segments of one step, each by another world than the one
before. The long form also cuts the first run off after every step, as a kill would, and another world goes on from
there to the end: it takes the newest checkpoint, repeats what the ledger has, and must come to the same ledger.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import torch
import torch.distributed as dist

import kernels
from model.ranks import Ranks
from model.spec import Phase, ScheduleSpec
from storage import checkpoint
from storage.ledger import part_key
from storage.run import Run, open_run
from storage.store import LocalStore
from storage.stream import Stream
from storage.team import SOLO, Led, follow
from storage.training import train_segment
from tests.model import tiny
from tests.storage import small

STEPS, SIZES, CHECKPOINTS = 30, (2, 3, 1), 7  # a checkpoint every 7 steps: most steps have none
WINDOWS = 5  # of a step: they divide evenly among no world of several
LIMIT = 240  # seconds for one segment
FORK = multiprocessing.get_context("fork")


def begin(folder: Path) -> None:
    """A new run of 30 steps, before its first; the model and its arithmetic are the real ones."""
    schedule = ScheduleSpec(
        peak_lr="0.003",
        warmup_tokens=64,
        total_tokens=small.SEQ_LEN * WINDOWS * STEPS,
        phases=(Phase(from_tokens=0, windows=WINDOWS),),
    )
    stores = LocalStore(folder / "run"), LocalStore(folder / "mix")
    small.begin(folder, *stores, schedule=schedule, numerics=tiny.LEAST)


def opened(folder: Path) -> Run:
    """The run, its whole ledger verified."""
    return open_run(LocalStore(folder / "run"), Stream.open(LocalStore(folder / "mix")))


class World:
    """Processes that train segments together, as those that torchrun starts; they wait for the next one."""

    def __init__(self, size: int, meet: Path) -> None:
        self.orders = [FORK.SimpleQueue() for _ in range(size)]
        self.answers = FORK.Queue()
        self.ranks = [
            FORK.Process(target=self._rank, args=(rank, size, meet / str(size)), daemon=True) for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def train(self, folder: Path, until: int) -> list[int]:
        """One segment; the steps that it repeated."""
        for orders in self.orders:
            orders.put((folder, until))
        answer = self.answers.get(timeout=LIMIT)
        assert isinstance(answer, tuple), answer
        return list(answer)

    def _rank(self, rank: int, size: int, meet: Path) -> None:
        torch.set_num_threads(1)
        numba.set_num_threads(1)
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
        while True:
            folder, until = self.orders[rank].get()
            if rank:
                follow("cpu")
                continue
            try:
                self.answers.put(segment(folder, until, size))
            except Exception as error:
                self.answers.put(f"{type(error).__name__}: {error}")


def segment(folder: Path, until: int, size: int) -> tuple[int, ...]:
    """Rank 0's part of a segment; the steps that it repeated."""
    run = opened(folder)
    team = Led(Ranks(kernels.backend("cpu"), run.spec.model)) if size > 1 else SOLO
    done = train_segment(run, "cpu", until, checkpoint_every=CHECKPOINTS, diagnostics_every=9, team=team)
    return done.validated


def cut_off(plain: Path, folder: Path, step: int) -> list[int]:
    """A copy of the run as it was when the entry of `step` − 1 had just been written; the steps to be repeated."""
    shutil.copytree(plain, folder)
    for number in range(step, STEPS):
        (folder / "run" / part_key(number)).unlink()
    store = LocalStore(folder / "run")
    for made in checkpoint.steps(store):
        if made >= step:  # state `step` would have been written next
            store.delete(checkpoint.checkpoint_key(made))
    return list(range(checkpoint.steps(store)[-1], step))


def check(short: bool, folder: Path) -> Iterator[str]:
    """Lines of a report; AssertionError where a head is another."""
    first = FORK.Process(target=begin, args=(folder / "new",))
    first.start()
    first.join()
    worlds: dict[int, World] = {size: World(size, folder) for size in SIZES}
    plain, chain = folder / "plain", folder / "chain"
    shutil.copytree(folder / "new", plain)
    shutil.copytree(folder / "new", chain)
    worlds[1].train(plain, STEPS)
    expected = opened(plain).ledger
    assert len(expected) == STEPS
    for step in range(STEPS):
        assert worlds[SIZES[step % 3]].train(chain, step + 1) == [], step
    assert _parts(chain) == _parts(plain) and opened(chain).ledger.head == expected.head
    yield f"resumed at every step, by {', '.join(map(str, SIZES))} processes in turn: one ledger, one head"
    yield f"trajectory root {expected.trajectory_root()}"
    for step in () if short else range(1, STEPS):
        repeated = cut_off(plain, folder / f"cut-{step}", step)
        assert worlds[SIZES[step % 2]].train(folder / f"cut-{step}", STEPS) == repeated, step
        assert _parts(folder / f"cut-{step}") == _parts(plain), step
        shutil.rmtree(folder / f"cut-{step}")
    if not short:
        yield "cut off after every step, gone on with by 2 or 3 processes that repeated and compared: the same ledger"


def _parts(folder: Path) -> dict[str, Any]:
    store = LocalStore(folder / "run")
    return {key: store.read(key) for key in store.list("ledger/")}


def main() -> None:
    """Print the report; exit with an error where anything differs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        for line in check("--short" in sys.argv[1:], Path(name)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
