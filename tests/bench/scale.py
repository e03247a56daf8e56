"""A step by 1, 2 and 4 processes of this machine: efficiency, bytes that travel, share of digests.

    python -m tests.bench.scale [--rounds 3] [--tiny]

Processes share the cores, so perfect scaling is the speed of one process that has them all. Worlds take turns, because
neighbours change rates by a factor of two; times are medians over rounds of a world's second step. Processor seconds,
of all processes together, hardly see neighbours: their ratio is what being many costs, waiting apart. Prints a Markdown
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
import numba
import numpy as np
import torch
import torch.distributed as dist

import kernels
from model.group import ALONE
from model.ranks import Ranks
from model.spec import ModelSpec, NumericsSpec, RunSpec
from model.state import initial_state
from model.step import step
from tests.bench.shapes import SHAPES, TINY, run_of
from tests.device.launch import own_state

WORLDS, WINDOWS = (1, 2, 4), 8
SMALL: dict[str, Any] = {**SHAPES["10M"], "seq_len": 1024, "window": 512, "full_every": 5}
KINDS = ("gradients", "codes", "tables", "squares", "digests", "scalars")


def run_for(tiny: bool) -> RunSpec:
    """Steps of 8 units of one window: of 1,024 tokens and about 10 M parameters, or tiny."""
    return run_of(TINY if tiny else ModelSpec(**SMALL), WINDOWS, NumericsSpec())


def world(run: RunSpec, size: int) -> list[dict[str, Any]]:
    """What each of `size` forked processes counted in its second step."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [fork.Process(target=_rank, args=(run, size, rank, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _rank(run: RunSpec, size: int, rank: int, folder: Path) -> None:
    threads = max(1, (os.cpu_count() or 1) // size)
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.get_num_threads()))
    backend, group = kernels.backend("cpu"), None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        group = Ranks(backend, run.model)
    state = own_state(run, backend, group) if group else initial_state(run, backend)
    drawn = np.random.default_rng(0).integers(0, run.model.vocab, (WINDOWS, run.model.seq_len + 1))
    for _ in range(2):
        if group:
            group.sent.clear()
            group.seconds.clear()
            dist.barrier()
        began, used = time.perf_counter(), _processor()
        record = step(run, backend, state, drawn, group=group or ALONE)
        found: dict[str, Any] = {"seconds": time.perf_counter() - began, "processor": _processor() - used}
    found |= {"state": record.state, "threads": threads}
    found |= {"sent": dict(group.sent), "waited": dict(group.seconds)} if group else {"sent": {}, "waited": {}}
    if not group:  # the whole state's digests, made once more
        began = time.perf_counter()
        backend.leaves_of(state.tensors())
        found["waited"]["hashing"] = (time.perf_counter() - began) * 5 / 3  # and the gradient's, two thirds of it
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if group:
        dist.destroy_process_group()


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(size: int, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One world's figures: medians over rounds, of the slowest rank; bytes of the rank that sent most."""

    def median(of: Any) -> float:
        return statistics.median(of(ranks) for ranks in rounds)

    most = max(rounds[0], key=lambda found: sum(found["sent"].values()))
    return {
        "processes": size,
        "threads": rounds[0][0]["threads"],
        "seconds": median(lambda ranks: max(found["seconds"] for found in ranks)),
        "processor_seconds": median(lambda ranks: sum(found["processor"] for found in ranks)),
        "digests": median(lambda ranks: max(found["waited"]["hashing"] / found["seconds"] for found in ranks)),
        "sent": {kind: most["sent"].get(kind, 0) for kind in KINDS},
    }


def table(rows: list[dict[str, Any]], tokens: int) -> None:
    """Printed as Markdown."""
    kinds = " | ".join(f"{kind}, MB" for kind in KINDS[:-1])
    print(
        f"| processes × threads | s a step | tokens/s | efficiency | processor s | its efficiency | digests | {kinds} |"
    )
    print("|" + "---|" * (7 + len(KINDS) - 1))
    for row in rows:
        wall, used = (rows[0][name] / row[name] for name in ("seconds", "processor_seconds"))
        cells = [f"{row['processes']} × {row['threads']}", f"{row['seconds']:.2f}", f"{tokens / row['seconds']:,.0f}"]
        cells += [f"{wall:.0%}", f"{row['processor_seconds']:.2f}", f"{used:.0%}", f"{row['digests']:.1%}"]
        cells += [f"{row['sent'][kind] / 1e6:.2f}" for kind in KINDS[:-1]]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Rounds of all worlds, then the report; an error where they do not end in one state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="does it run at all?")
    asked = parser.parse_args()
    run, found = run_for(asked.tiny), dict[int, list[list[dict[str, Any]]]]()
    for number in range(asked.rounds):
        for size in WORLDS:
            ranks = world(run, size)
            found.setdefault(size, []).append(ranks)
            seconds = max(rank["seconds"] for rank in ranks)
            print(f"round {number + 1} of {asked.rounds}, {size}: {seconds:.2f} s", file=sys.stderr, flush=True)
    states = {rank["state"] for rounds in found.values() for ranks in rounds for rank in ranks}
    if len(states) > 1:
        raise SystemExit(f"{len(states)} states from one run: {sorted(states)}")
    rows = [summary(size, rounds) for size, rounds in found.items()]
    table(rows, WINDOWS * run.model.seq_len)
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "parameters": run.model.parameter_count()}
    print(json.dumps({**machine, "windows": WINDOWS, "seq_len": run.model.seq_len, "rows": rows}))


if __name__ == "__main__":
    main()
