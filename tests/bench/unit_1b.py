"""The 1.608 B shape on this machine: the gradients of one unit within a budget of memory; with --step, a whole step.

    make unit-1b
    python -m tests.bench.unit_1b [--windows 4] [--budget 22] [--step FOLDER]

Prints one JSON line: what the plan says that the piece needs, by purpose, and what it took. A step keeps the
moments in a memory map in FOLDER. Memory that belongs to files (mapped moments, libraries) is told apart: the system
takes it back when it needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from kernels import digest
from kernels.reference.philox import words
from model import memory, step
from model.memory import MemoryPlan, Piece
from model.spec import Phase, RunSpec
from model.state import initial_state
from storage import recipe
from storage.memory import moments
from storage.store import LocalStore

GB = 10**9


def spec(windows: int) -> RunSpec:
    """The open_1b recipe with units of so many windows, and steps of one unit."""
    run = recipe.load("open_1b").run
    schedule = run.schedule.model_copy(update={"phases": (Phase(from_tokens=0, windows=windows),)})
    numerics = run.numerics.model_copy(update={"unit_windows": windows})
    return run.model_copy(update={"schedule": schedule, "numerics": numerics})


def tokens(run: RunSpec) -> np.ndarray:
    """One unit of windows i64[N, S+1], drawn evenly over the vocabulary."""
    shape = run.numerics.unit_windows, run.model.seq_len + 1
    drawn = words(run.seed, "unit_1b", 0, shape[0] * shape[1]).astype(np.int64)
    return (drawn * run.model.vocab >> 32).reshape(shape)


def status() -> dict[str, int]:
    """This process's memory in bytes: VmHWM, RssAnon, RssFile and the like."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {field[0].rstrip(":"): 1024 * int(field[1]) for field in fields}


@contextmanager
def watched(peak: dict[str, int]) -> Iterator[None]:
    """Fills in the largest RssAnon and RssFile seen, looking ten times a second."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            now = status()
            for name in ("RssAnon", "RssFile"):
                peak[name] = max(peak.get(name, 0), now[name])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def unit(run: RunSpec, plan: MemoryPlan) -> dict[str, Any]:
    """Draw the weights, compute the unit's gradients; seconds of each, and the gradient's root."""
    backend, began = kernels.backend("cpu"), time.monotonic()
    weights = initial_state(run, backend).weights
    drawn = time.monotonic()
    summed = step.gradients(run, backend, weights, tokens(run), plan)
    done = time.monotonic()
    root = digest.root({name: digest.tensor_digest(name, s) for name, s in sorted(summed.sums.items())}, {})
    seconds = {"weights_seconds": round(drawn - began, 1), "gradient_seconds": round(done - drawn, 1)}
    return {**seconds, "finite": summed.finite, "gradient": root}


def whole_step(run: RunSpec, plan: MemoryPlan, folder: str) -> dict[str, Any]:
    """Step 0 of one unit, its moments where the plan wants them; seconds, and the roots of gradient and state."""
    backend, began = kernels.backend("cpu"), time.monotonic()
    state = initial_state(run, backend, moments(run, plan, LocalStore(Path(folder))))
    drawn = time.monotonic()
    record = step.step(run, backend, state, tokens(run), memory=plan)
    seconds = {"weights_seconds": round(drawn - began, 1), "step_seconds": round(time.monotonic() - drawn, 1)}
    return {**seconds, "finite": record.loss is not None, "gradient": record.gradient, "state": record.state}


def main() -> None:
    """Measure the piece that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4, help="of the unit")
    parser.add_argument("--budget", type=float, default=22, help="GB of 10⁹ bytes")
    parser.add_argument("--step", metavar="FOLDER", help="a whole step, its moments in a file there")
    asked = parser.parse_args()
    Path("/proc/self/oom_score_adj").write_text("1000")  # rather this than its neighbours
    run = spec(asked.windows)
    piece: Piece = "step" if asked.step else "unit"
    plan = memory.choose(run, piece, int(asked.budget * GB))
    if plan is None:
        least = memory.total(memory.needs(run, memory.leanest(run, piece), piece)) / GB
        raise SystemExit(f"the {piece} takes {least:.2f} GB by the leanest plan, the budget is {asked.budget} GB")
    needs, peak = memory.needs(run, plan, piece), dict[str, int]()
    with watched(peak):
        found = whole_step(run, plan, asked.step) if asked.step else unit(run, plan)
    report = {
        "piece": piece,
        "parameters": run.model.parameter_count(),
        "windows": asked.windows,
        "plan": str(plan),
        "needs_gb": {name: round(size / GB, 2) for name, size in needs.items()},
        "needs_total_gb": round(memory.total(needs) / GB, 2),
        "budget_gb": asked.budget,
        "peak_rss_gb": round(status()["VmHWM"] / GB, 2),
        "peak_anonymous_gb": round(peak["RssAnon"] / GB, 2),
        "peak_of_files_gb": round(peak["RssFile"] / GB, 2),
        "threads": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(report | found))


if __name__ == "__main__":
    main()
