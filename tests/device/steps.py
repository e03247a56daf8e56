"""Steps whose records any two backends must agree on, on one machine or on two: a GPU against the processors beside it.

    python -m tests.device.steps run BACKEND {small,full} FILE     writes one JSON line a step, as it is done
    python -m tests.device.steps compare FILE FILE                 exits 1 where a step differs or none is in both
    python -m tests.device.steps units BACKEND                     one gradient from any order and grouping of units

small: 120 steps of a model of 0.9 M parameters. full: 3 steps of the 1.608 B shape at its full length, 4 units in all.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
import numpy as np

import kernels
from kernels import digest
from kernels.reference.philox import words
from model.schedule import plan
from model.spec import ModelSpec, NumericsSpec, Phase, RunSpec, ScheduleSpec
from model.state import initial_state
from model.step import gradients, step
from tests.bench.shapes import OPEN_1B

SMALL = ModelSpec(
    vocab=2048, d_model=128, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=352, seq_len=320, window=96, full_every=2
)
STEPS = {"small": 120, "full": 3}
COMPARED = ("step", "loss", "z_loss", "grad_norm", "gradient", "state", "event")
UNITS = 32


def spec(size: str) -> RunSpec:
    """Small: steps of 2 units of 2 windows. Full: units of one window; two steps of one, then of two."""
    model, unit = (SMALL, 2) if size == "small" else (OPEN_1B, 1)
    phases = (Phase(from_tokens=0, windows=4),)
    if size == "full":
        phases = (Phase(from_tokens=0, windows=1), Phase(from_tokens=2 * model.seq_len, windows=2))
    schedule = ScheduleSpec(
        peak_lr="0.001", warmup_tokens=8 * model.seq_len, total_tokens=1000 * model.seq_len, phases=phases
    )
    numerics = NumericsSpec(weight_scale="lsq", weight_gradient_slices=1, unit_windows=unit)
    return RunSpec(name=size, seed=11, model=model, numerics=numerics, schedule=schedule)


def windows(run: RunSpec, first: int, count: int) -> np.ndarray:
    """Windows i64[count, S + 1] of a made-up stream, each token a guess from the one before, so that there is a loss to
    gain."""
    length, vocab = run.model.seq_len + 1, run.model.vocab
    drawn = words(run.seed, "steps", first * length, count * length).astype(np.int64).reshape(count, length)
    return (drawn % 7 + 3 * np.arange(length)) % vocab


def record(name: str, size: str, file: Path) -> None:
    """Run the steps; a line is written as soon as its step is done."""
    run, backend = spec(size), kernels.backend(name)
    state = initial_state(run, backend).placed(backend.to_device)
    with file.open("w", encoding="utf-8") as out:
        for number in range(STEPS[size]):
            began, at = time.monotonic(), plan(run, number)
            done = step(run, backend, state, windows(run, at.first_window, at.windows))
            line = {field: getattr(done, field) for field in COMPARED}
            line |= {"units": at.windows // run.numerics.unit_windows, "seconds": round(time.monotonic() - began, 2)}
            print(json.dumps(line | {"backend": backend.describe()} if number == 0 else line), file=out, flush=True)


def compare(*files: Path) -> int:
    """0 if both files hold the same steps, one at least, each with one record."""
    both = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    pairs = list(zip(*both, strict=False))
    differing = [(a["step"], field) for a, b in pairs for field in COMPARED if a[field] != b[field]]
    counts = [len(steps) for steps in both]
    print(f"{counts} steps; {differing[:5] if differing else 'every record in both is equal'}")
    return 1 if differing or not pairs or len(set(counts)) > 1 else 0


def units(name: str) -> int:
    """One root for units in any order, in one sum or in several joined; and a unit's own for a step of one."""
    run, backend = spec("small"), kernels.backend(name)
    weights = initial_state(run, backend).placed(backend.to_device).weights
    all_windows = windows(run, 0, UNITS * run.numerics.unit_windows).reshape(UNITS, -1, run.model.seq_len + 1)

    def root(groups: list[Any]) -> str:
        """The root of the sum over groups of units."""
        total: dict[str, np.ndarray] = {}
        for group in groups:
            sums = gradients(run, backend, weights, np.concatenate([all_windows[unit] for unit in group])).sums
            for key, value in sums.items():
                total[key] = total.get(key, 0) + backend.to_host(value)
        return digest.root(digest.tensor_digests(total, digest.leaves_of(total)), {})

    order = np.random.default_rng(0).permutation(UNITS).tolist()
    ways = {
        "32 units, one sum": [list(range(UNITS))],
        "32 units, shuffled": [order],
        "32 sums of one unit": [[unit] for unit in order],
        "sums of 5, 11 and 16": [order[:5], order[5:16], order[16:]],
    }
    found = {way: root(groups) for way, groups in ways.items()}
    alone = {root([list(p)]) for p in permutations(range(3))} | {root([[2], [0], [1]])}
    print(json.dumps({"backend": backend.describe(), "roots": found, "three units, seven ways": sorted(alone)}))
    return 0 if len(set(found.values())) == 1 and len(alone) == 1 else 1


def main(arguments: list[str]) -> int:
    """One of the three commands."""
    match arguments:
        case ["run", name, ("small" | "full") as size, file]:
            record(name, size, Path(file))
            return 0
        case ["compare", one, other]:
            return compare(Path(one), Path(other))
        case ["units", name]:
            return units(name)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
