"""Microseconds from (seed, step) to the windows of the step: `python -m tests.bench.corpus access`.

The mixture of the four sources of open_1b, 109.9 million windows, in blocks of 65,536; steps of 1,152 windows drawn
anywhere in the stream. "Cold": no table of a block is kept from before; "warm": the step's tables are. Nothing is read:
from a window's source and position follow its file and place.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from storage.corpus import mixture
from storage.corpus.mixture import Mixture, largest_remainder

NAMES = ("dclm", "fineweb-edu", "stack-v2", "proof-pile-2")
WINDOWS = (73_300_000, 14_600_000, 13_200_000, 8_800_000)
BLOCK, STEP = 65_536, 1_152
SEED, DRAWN = 42, 200
SMALLER = 1_000  # the same mixture with so many times fewer windows: constant time is the same time


def mixed(divided: int = 1) -> Mixture:
    """The mixture by largest remainder, as a recipe with `block` has it."""
    windows = tuple(count // divided for count in WINDOWS)
    return Mixture(SEED, NAMES, windows, tuple(largest_remainder(list(windows), BLOCK)))


def microseconds(mix: Mixture, first_pass: int) -> dict[str, list[float]]:
    """Cold and warm times of steps drawn in a pass of the whole mixture."""
    total = sum(mix.windows)
    first, end = (number * total // STEP for number in (first_pass, first_pass + 1))
    steps = np.random.default_rng(first_pass).integers(first, end, DRAWN)
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for step in steps.tolist():
        index = np.arange(step * STEP, (step + 1) * STEP)
        mixture._slots.cache_clear()
        for kind in found:
            began = time.perf_counter()
            mix.locate(index)
            found[kind].append((time.perf_counter() - began) * 1e6)
    return found


def measured() -> list[dict[str, Any]]:
    """A row for each size of mix, pass and kind; printed as Markdown."""
    rows = []
    print(f"{DRAWN} steps of {STEP:,} windows, drawn; {len(NAMES)} sources, blocks of {BLOCK:,}.\n")
    print("| windows of the mix | step | tables of blocks | µs a step, median | 99 % | µs a window |")
    print("|---|---|---|---|---|---|")
    for divided in (SMALLER, 1):
        mix = mixed(divided)
        for number, where in ((0, "first pass"), (2, "third pass")):
            for kind, taken in microseconds(mix, number).items():
                middle, slowest = statistics.median(taken), float(np.quantile(taken, 0.99))
                figures = f"{middle:,.0f} | {slowest:,.0f} | {middle / STEP:.2f}"
                print(f"| {sum(mix.windows):,} | {where} | {kind} | {figures} |", flush=True)
                rows.append({"windows": sum(mix.windows), "where": where, "kind": kind, "us": middle, "p99": slowest})
    return rows
