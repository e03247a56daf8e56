"""A world of processes that do some steps of a tiny run together: forked, so that what is imported is imported once.

The process that calls steps() must have started no threads: a fork has none of its parent's, but would wait for them.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.distributed as dist

import kernels
from kernels import digest
from model import schedule
from model.group import ALONE
from model.ranks import Ranks, dealt
from model.spec import Phase, RunSpec
from model.state import State, initial_state
from model.step import evaluate, step
from model.wire import Device
from tests.model import tiny

FEW = 7  # units that divide evenly among no world here


def spec() -> RunSpec:
    """Four steps of 12 units, then steps of 7; embedding and head of several leaves, so that ranks share them."""
    run = tiny.spec(seq_len=32, windows=12, layers=2, vocab=1500, steps=40)
    phases = (Phase(from_tokens=0, windows=12), Phase(from_tokens=4 * 12 * 32, windows=FEW))
    return run.model_copy(update={"schedule": run.schedule.model_copy(update={"phases": phases})})


@dataclasses.dataclass(frozen=True)
class Part:
    """A segment of a trajectory: how many ranks (0: one process without any group), how many units' sums they join at
    a time, and how many steps."""

    size: int
    batch: int | None
    steps: int
    backend: str = "cpu"
    plant: tuple[str, int, int] | None = None  # a parameter, a row and the bits that its first element gets
    device: bool = False  # arrays travel as GPUs' do, but over gloo


@dataclasses.dataclass(frozen=True)
class Done:
    """What a segment gave: its steps' records as they are, the state after it, and what each rank counted."""

    records: list[dict[str, Any]]
    held_out: str | None
    state: State
    figures: list[dict[str, Any]]


def together(run: RunSpec, part: Part, state: State | None = None) -> Done:
    """The segment by `part.size` processes; an error names those that failed."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [fork.Process(target=_rank, args=(run, part, state, rank, folder)) for rank in range(max(1, part.size))]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if failed := [f"rank {rank}: {p.exitcode}" for rank, p in enumerate(ranks) if p.exitcode]:
            raise RuntimeError(f"{part}: {', '.join(failed)}")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(ranks))]
        tensors = dict(np.load(folder / "state.npz"))
    if any(other["records"] != found[0]["records"] or other["held_out"] != found[0]["held_out"] for other in found):
        raise RuntimeError(f"{part}: the ranks do not agree with each other")
    after = State.of(tensors, found[0]["scalars"])
    return Done(found[0]["records"], found[0]["held_out"], after, [other["figures"] for other in found])


def _rank(run: RunSpec, part: Part, state: State | None, rank: int, folder: Path) -> None:
    share = max(1, (os.cpu_count() or 1) // max(1, part.size))
    torch.set_num_threads(share)
    numba.set_num_threads(min(share, numba.get_num_threads()))
    backend = kernels.backend(part.backend)
    given = (state or initial_state(run, backend)) if rank == 0 else None
    if part.size:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=part.size)
        group = Ranks(backend, run.model, part.batch)
        group.wire = Device(torch.device("cpu"), dist.group.WORLD) if part.device else group.wire
        done = _steps(run, part, group.scattered(given), group)
        whole = group.gathered(done.state)
        dist.destroy_process_group()
    else:
        assert given is not None
        done = _steps(run, part, given, ALONE)
        whole = done.state.placed(backend.to_host)
    if whole is not None:
        np.savez(folder / "state.npz", **whole.tensors())  # type: ignore[arg-type]
    result = {"records": done.records, "held_out": done.held_out, "figures": done.figures[0]}
    (folder / f"{rank}.json").write_text(json.dumps(result | {"scalars": done.state.scalars()}))


def _steps(run: RunSpec, part: Part, state: State, group: Any) -> Done:
    backend, records, seconds = kernels.backend(part.backend), [], []
    _plant(part, state, group)
    for _ in range(part.steps):
        plan = schedule.plan(run, state.step)
        windows = _given(part, group, tiny.windows(run, plan.first_window, plan.windows), run.numerics.unit_windows)
        began = time.perf_counter()
        taken: dict[str, np.ndarray] = {}
        take = taken.update if plan.step % 4 == 3 else None
        record = step(run, backend, state, windows, diagnose=plan.step % 2 == 0, take=take, group=group)
        seconds.append(time.perf_counter() - began)
        digests = digest.tensor_digests(taken, digest.leaves_of(taken))
        records.append(json.loads(json.dumps(dataclasses.asdict(record) | {"taken": digests})))
    counted = {"sent": dict(group.sent), "seconds": dict(group.seconds)} if part.size else {}
    held_out = evaluate(run, backend, state, _given(part, group, tiny.windows(run, 1000, 5), 1), group=group)
    return Done(records, held_out, state, [{"step": sorted(seconds)[len(seconds) // 2], **counted}])


def _given(part: Part, group: Any, windows: np.ndarray, unit: int) -> np.ndarray:
    """What a rank gets of windows that rank 0 has."""
    return dealt(windows if group.rank == 0 else None, unit) if part.size else windows


def _plant(part: Part, state: State, group: Any) -> None:
    if part.plant is None:
        return
    name, row, bits = part.plant
    first = group.own[name].start if isinstance(group, Ranks) and name in group.own else 0
    if name in state.weights and 0 <= row - first < len(state.weights[name]):
        state.weights[name][row - first : row - first + 1].reshape(-1).view(np.uint32)[0] = bits


def in_turn(run: RunSpec, parts: list[Part]) -> Iterator[Done]:
    """One trajectory, each part by a world of its own, from the state that the part before gathered."""
    state = None
    for part in parts:
        done = together(run, part, state)
        state = done.state
        yield done
