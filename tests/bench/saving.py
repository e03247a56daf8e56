"""How long a checkpoint every ten steps stops training: written beside it, in place, and not at all, in turns.

    python -m tests.bench.saving [--size 10M] [--windows 1] [--rounds 3] [--cycles 2] [--backend cpu] [--folder …]
    python -m tests.bench.saving --backend nvidia --size 1B --windows 64 --rounds 1     a GPU: beside, and not at all
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.saving …     the same by two ranks

Each turn is a segment of a run of its own in an empty folder, by the training loop as it is; a cycle is the ten steps
around a checkpoint, from the middle of one interval to that of the next. "Stopped" is the time in which the loop does
nothing but checkpoint: wait for the save before, and copy. Neighbours change absolute rates, so what a cycle takes more
than one without a checkpoint is the median over rounds of ratios within a round; "processor" is the same of the
process's own seconds on the cores, which neighbours change least, and which a save beside training shares with it.
Steps are also told apart by whether a save was in flight beside them. The last column is the share of a cycle of a
hundred steps, the recipes' own, that a checkpoint takes: what it stopped, and what it slowed the steps beside it.
Held-out losses are no part of it: these runs have none. Each save's objects are removed once it is timed, so that a
disk need hold but one. Prints a Markdown table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
import numpy as np
import torch.distributed as dist

from kernels.digest import digest
from model.memory import KEEP_ALL, MemoryPlan
from model.ranks import Ranks, launched, started_by_torchrun
from model.spec import NumericsSpec, RunSpec
from model.state import initial_state, root
from storage import checkpoint, engine, training
from storage.ledger import Header, create_header
from storage.memory import forecast
from storage.run import Run, open_run
from storage.store import LocalStore
from storage.team import SOLO, Led, Team, follow
from tests.bench.shapes import OPEN_1B, SHAPES, run_of, spec

EVERY = 10
RECIPES = 100  # steps of a cycle as recipes have it
NONE = "f" * 64
KINDS = {"none": None, "beside": True, "in place": False}  # name → whether from a copy; None: no checkpoint


class Windows:
    """A stream of drawn tokens without held-out windows."""

    def __init__(self, run: RunSpec) -> None:
        self.shape, self.vocab = run.model.seq_len + 1, run.model.vocab
        sources = SimpleNamespace(sources=(), tokenizer=SimpleNamespace(vocab=self.vocab))
        self.manifest = SimpleNamespace(root=NONE, held_out_root=NONE, mix=sources)
        self.window_tokens = self.shape

    def windows(self, first: int, count: int) -> np.ndarray:
        """Evenly drawn."""
        return np.random.default_rng(first).integers(0, self.vocab, (count, self.shape))

    def batch_digest(self, first: int, count: int) -> str:
        """Of their numbers."""
        return digest(repr((first, count)).encode(), "batch")

    def held_out(self) -> np.ndarray:
        """None."""
        return np.empty((0, self.shape), np.int64)


class Turns:
    """Segments with each kind of checkpoint, and what they took."""

    def __init__(self, run: RunSpec, backend: str, folder: Path, cycles: int) -> None:
        self.run, self.backend, self.folder = run, backend, folder
        self.steps = cycles * EVERY + EVERY // 2 + 1  # cycles from step 5 on
        module = engine.load_backend(backend)
        device = module.device_memory()
        self.plan = KEEP_ALL if device is None else _plan(run, device)
        self.kinds = [kind for kind in KINDS if device is None or kind != "in place"]  # nobody saves a GPU's state so
        self.initial = root(initial_state(run, module).placed(module.to_host))[0]
        self.cycles: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.stopped: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.saves: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.alone: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.beside: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def take(self, kind: str) -> None:
        """One segment; notes its cycles."""
        times: list[tuple[float, float]] = []
        with tempfile.TemporaryDirectory(dir=self.folder) as name, self._watched(kind):
            training.train_segment(
                self._begun(Path(name)),
                self.backend,
                self.steps,
                checkpoint_every=self.steps if KINDS[kind] is None else EVERY,
                diagnostics_every=10 * self.steps,
                report=lambda progress: times.append((time.perf_counter(), time.process_time())),
                team=self._team(),
            )
        at = times[EVERY // 2 - 1 :: EVERY]
        for wall, own in (np.subtract(after, before) for before, after in itertools.pairwise(at)):
            self.cycles[kind].append(float(wall))
            self.processor[kind].append(float(own))
        # The first checkpoint takes the room for the copy, the last ends the segment; neither is in a cycle.
        for kept, new in ((self.stopped, self._stops), (self.saves, self._writes)):
            kept[kind] += [end - start for start, end in new[1:-1]]
        self._tell_apart(kind, [wall for wall, _ in times])

    def _tell_apart(self, kind: str, ends: list[float]) -> None:
        """Steps in the cycles, without what a checkpoint stopped before them: whether a save was beside all of it."""
        for before, end in itertools.pairwise(ends[EVERY // 2 - 1 :]):
            start = max([before, *(stopped for _, stopped in self._stops if stopped < end)])
            if not any(first < end and start < last for first, last in self._writes):
                self.alone[kind].append(end - start)
            elif any(first <= start and end <= last for first, last in self._writes):
                self.beside[kind].append(end - start)

    def _team(self) -> Team:
        """All of a turn's ranks meet anew."""
        module = engine.load_backend(self.backend)
        return Led(Ranks(module, self.run.model)) if started_by_torchrun() else SOLO

    def _begun(self, folder: Path) -> Run:
        store, stream = LocalStore(folder), Windows(self.run)
        fields = {"mix_root": NONE, "held_out_root": NONE, "trainer": NONE, "code": NONE, "lock": NONE}
        create_header(store, Header(spec=self.run.canonical(), initial_root=self.initial, **fields))
        return open_run(store, stream)  # type: ignore[arg-type]

    def _watched(self, kind: str) -> Any:
        """Around a segment: its plan, and the clocks."""
        self._stops: list[tuple[float, float]] = []
        self._writes: list[tuple[float, float]] = []
        plan = replace(self.plan, copy_state=bool(KINDS[kind]))
        save = _removed(_clocked(checkpoint.save, self._writes)) if kind != "none" else lambda *arguments: None
        patches = mock.patch.multiple(
            training,
            plan_for=lambda *arguments: plan,
            _Segment=_timed(training._Segment, "_checkpoint", self._stops),
            checkpoint=SimpleNamespace(steps=checkpoint.steps, load=checkpoint.load, save=save),
        )
        return patches

    def line(self, kind: str) -> dict[str, Any]:
        """What this kind of checkpoint took."""
        cycle = statistics.median(self.cycles[kind])
        found = {"kind": kind, "cycle_s": cycle, "more": _more(self.cycles, kind)}
        found["processor"] = _more(self.processor, kind)
        if KINDS[kind] is None:
            return found
        stopped = statistics.median(self.stopped[kind])
        longest = max(self.stopped[kind])
        save = statistics.median(self.saves[kind])
        found |= {"stopped_s": stopped, "longest_s": longest, "share": stopped / cycle, "save_s": save}
        if not self.beside[kind]:  # a save takes less than a step
            return found
        beside, alone = statistics.median(self.beside[kind]), statistics.median(self.alone["none"])
        lost = stopped + save * (1 - alone / beside)
        return found | {"step_s": alone, "beside_s": beside, "recipes": lost / (lost + RECIPES * alone)}


def _more(seconds: dict[str, list[float]], kind: str) -> float:
    """By how much more than without a checkpoint: the median of the rounds' own ratios, less 1."""
    return statistics.median(own / none for own, none in zip(seconds[kind], seconds["none"], strict=True)) - 1


def _plan(run: RunSpec, device: int) -> MemoryPlan:
    """By which a GPU trains it, whatever the machine around it has."""
    return next(found.plan for found in forecast(run, device) if found.piece == "training")


def _clocked(function: Any, spans: list[tuple[float, float]]) -> Any:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spans.append((began, time.perf_counter()))

    return call


def _removed(save: Any) -> Any:
    def call(store: LocalStore, *arguments: Any) -> Any:
        manifest = save(store, *arguments)
        for key in store.list("objects/"):
            store.delete(key)
        return manifest

    return call


def _timed(kind: type, method: str, spans: list[tuple[float, float]]) -> type:
    return type(kind.__name__, (kind,), {method: _clocked_method(getattr(kind, method), spans)})


def _clocked_method(function: Any, spans: list[tuple[float, float]]) -> Any:
    clocked = _clocked(function, spans)
    return lambda self: clocked(self)


def shape(size: str, windows: int) -> RunSpec:
    """One of SHAPES, or 1B."""
    return run_of(OPEN_1B, windows, NumericsSpec(unit_windows=4)) if size == "1B" else spec(size, windows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=(*SHAPES, "1B"), default="10M")
    parser.add_argument("--windows", type=int, default=1, help="of 4,096 tokens, a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=2, help="of ten steps, a turn")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk that is written to")
    return parser.parse_args()


def main() -> None:
    """Turns and their table; a rank other than 0 follows."""
    asked = arguments()
    run = shape(asked.size, asked.windows)
    with launched(asked.backend) as rank:
        module = engine.load_backend(asked.backend)
        turns = Turns(run, asked.backend, asked.folder, asked.cycles)
        order = asked.rounds * turns.kinds
        if rank:
            for _ in order:
                follow(asked.backend)
            return
        for number, kind in enumerate(order):
            turns.take(kind)
            print(f"turn {number + 1} of {len(order)}: {kind}, {turns.cycles[kind][-1]:.2f} s", file=sys.stderr)
        report(turns, asked, module, dist.get_world_size() if started_by_torchrun() else 1)


def report(turns: Turns, asked: argparse.Namespace, module: Any, ranks: int) -> None:
    """The table and the JSON line."""
    parameters, lines = turns.run.model.parameter_count(), [turns.line(kind) for kind in turns.kinds]
    print(f"{parameters:,} parameters, a state of {12 * parameters / 1e6:,.0f} MB, {ranks} processes\n")
    print(
        f"| checkpoint | {EVERY} steps, s | more than without | processor | stopped, s (longest) | share | writing, s |"
        f" a step, s | beside a save, s | of {RECIPES} steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        start = f"| {line['kind']} | {line['cycle_s']:.2f} | {line['more']:+.1%} | {line['processor']:+.1%} |"
        if "share" not in line:
            print(f"{start} | | | | | |")
            continue
        stopped = f"{line['stopped_s']:.3f} ({line['longest_s']:.3f})"
        beside = "| |"
        if "recipes" in line:
            beside = f"{line['step_s']:.3f} | {line['beside_s']:.3f} | {line['recipes']:.2%}"
        print(f"{start} {stopped} | {line['share']:.2%} | {line['save_s']:.2f} | {beside} |")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "backend": module.describe()}
    known = {"size": asked.size, "windows": asked.windows, "rounds": asked.rounds, "ranks": ranks}
    known |= {"plan": str(turns.plan), "parameters": parameters}
    print(json.dumps({"machine": machine, **known, "lines": lines}))


if __name__ == "__main__":
    main()
