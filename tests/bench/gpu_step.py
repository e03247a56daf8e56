"""A step of the 1.608 B shape on a GPU beside stock PyTorch, in the same run; and where its time goes.

    python -m tests.bench.gpu_step [--windows 32] [--unit-windows 4] [--weight-gradient-slices {1,2}]
    python -m tests.bench.gpu_step --tiny --backend cpu      # does it run at all? no GPU needed

A step of ours is everything from tokens to the digested next state; the peer's (gpu_stock.py) is forward, backward,
clipping and AdamW. They take turns and free what they hold between; each begins its turn with an untimed short step,
so that the allocator has its memory again. The ratio is the median over rounds of two times from the same round.

Then one more step of ours with an event before and after each call of the backend, which says what share of the step
each class of kernels takes, and how near each is to its floor: the longer of the time that its integer products take
at the rate of the fastest large int8 product seen here, and the time that its operands and results take to be moved
once at the rate of a large copy (gpu_calls.py counts both). Prints a Markdown table, then one JSON
line.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

import kernels
from kernels import canonical
from model.spec import NumericsSpec
from model.state import State, initial_state
from model.step import StepRecord, step
from tests.bench.gpu_calls import CLASS_OF, CLASSES, Timed
from tests.bench.gpu_stock import Compiled, Trainer, device_of, parameters_of
from tests.bench.shapes import OPEN_1B, TINY, run_of

ONCE_A_STEP = ("weights' codes", "optimizer", "digests")
DIGESTED_BYTES = 20  # of a parameter: weight and moments f32, gradient i64


def timed(call: Callable[[], object], gpu: bool, repeats: int = 1) -> float:
    """Seconds of a call, the device's work included; the mean of `repeats` in a row."""
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def peaks(backend: ModuleType, device: torch.device) -> dict[str, float]:
    """Operations a second of large int8 products, of PyTorch's and of this backend; bytes a second of a large copy."""
    gpu = device.type == "cuda"
    n, flag = 8192 if gpu else 512, backend.new_flag()
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device) for _ in "ab")
    draw = np.random.default_rng(0).standard_normal((n, n), np.float32)
    rows = backend.quantise_rows(backend.to_device((draw.view(np.uint32) >> 16).astype(np.uint16)), 1, flag)
    weight = backend.quantise_weight(backend.to_device(draw), "max", flag)
    source = torch.ones(1 << (30 if gpu else 24), device=device)
    target = torch.empty_like(source)

    def best(call: Callable[[], object]) -> float:
        timed(call, gpu, 3)
        return min(timed(call, gpu, 10) for _ in range(3))

    return {
        "torch_int8": 2 * n**3 / best(lambda: torch._int_mm(a, b.t())),
        "backend_int8": 2 * n**3 / best(lambda: backend.project(rows, weight)),
        "copy": 2 * source.nbytes / best(lambda: target.copy_(source)),
    }


class Race:
    """Ours and the peer, on the same windows i64[N, S + 1] and from the same weights."""

    def __init__(self, backend: ModuleType, asked: argparse.Namespace, device: torch.device) -> None:
        self.backend, self.asked, self.gpu = backend, asked, device.type == "cuda"
        model = TINY if asked.tiny else OPEN_1B
        slices = asked.weight_gradient_slices
        numerics = NumericsSpec(unit_windows=asked.unit_windows, weight_gradient_slices=slices)
        self.run, self.short = (run_of(model, n, numerics) for n in (asked.windows, asked.unit_windows))
        random = np.random.default_rng(0)
        self.windows = random.integers(0, model.vocab, (asked.windows, model.seq_len + 1))
        self.state: State = initial_state(self.run, backend).placed(backend.to_device)
        held = self._allocated()
        self.compiled: Compiled = "no" if not self.gpu else "whole" if asked.whole else "blocks"
        parameters = parameters_of(backend, self.state.weights, device, torch.bfloat16)
        self.peer = Trainer(self.run, parameters, asked.micro, self.compiled)
        del parameters
        self.held = {"verbatim": held, "stock bf16": self._allocated() - held}
        self.peak = dict.fromkeys(self.held, 0)
        self.losses: dict[str, float] = {}  # of each contender's first timed step, on the same windows

    def _allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.gpu else 0

    def ours(self, backend: Any, short: bool = False) -> StepRecord:
        """A step of ours on all windows, or on one unit."""
        if short:
            return step(self.short, backend, self.state, self.windows[: self.asked.unit_windows])
        return step(self.run, backend, self.state, self.windows)

    def stock(self, short: bool = False) -> float:
        """A step of the peer on all windows, or on one micro-batch."""
        return float(self.peer.step(self.windows[: self.asked.micro] if short else self.windows))

    def turn(self, name: str, backend: Any = None) -> float:
        """Seconds of a contender's step, after a short one."""
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if name == "verbatim":
            self.ours(self.backend, short=True)
            found: list[StepRecord] = []
            seconds = timed(lambda: found.append(self.ours(backend or self.backend)), self.gpu)
            if found[0].loss is None:
                raise SystemExit("the step was not finite: nothing was measured; try checked:<backend> on a short step")
            self.losses.setdefault(name, float(canonical.from_bits(found[0].loss)))
        else:
            self.stock(short=True)
            losses: list[float] = []
            seconds = timed(lambda: losses.append(self.stock()), self.gpu)
            self.losses.setdefault(name, losses[0])
        if self.gpu:
            other = sum(held for contender, held in self.held.items() if contender != name)
            self.peak[name] = max(self.peak[name], torch.cuda.max_memory_allocated() - other)
        return seconds

    def digesting(self) -> float:
        """Bytes a second of the leaves' digests of the state."""
        tensors = self.state.tensors()
        self.backend.leaves_of(tensors)
        return sum(x.nbytes for x in tensors.values()) / timed(lambda: self.backend.leaves_of(tensors), self.gpu)


def breakdown(calls: Timed, whole: float, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Seconds, share of a step of `whole` seconds, floor and share of the floor, of each class; and what is between
    calls. Prints them as Markdown."""
    rate, table = max(rates["torch_int8"], rates["backend_int8"]), dict[str, dict[str, float]]()
    for call in calls.calls:
        row = table.setdefault(CLASS_OF[call.name], {"seconds": 0.0, "floor_seconds": 0.0})
        row["seconds"] += calls.seconds(call)
        row["floor_seconds"] += max(call.operations / rate, call.size / rates["copy"])
    between = whole - sum(row["seconds"] for row in table.values())
    table = {kind: table[kind] for kind in CLASSES if kind in table}
    print("| class | ms | share of the step | share of the floor |\n|---|---|---|---|")
    for kind, row in table.items():
        row["share"], row["of_floor"] = row["seconds"] / whole, row["floor_seconds"] / max(row["seconds"], 1e-9)
        print(f"| {kind} | {row['seconds'] * 1e3:.1f} | {row['share']:.1%} | {row['of_floor']:.2f} |")
    print(f"| between calls | {between * 1e3:.1f} | {between / whole:.1%} | |\n", flush=True)
    return table | {"between calls": {"seconds": between, "share": between / whole}}


def digest_report(rate: float, table: dict[str, dict[str, float]], plain: float, race: Race) -> dict[str, float]:
    """What digests of state and gradient take, here and in steps of 64 and 1,152 windows of the same speed."""
    seconds = DIGESTED_BYTES * race.run.model.parameter_count() / rate
    once = sum(table[kind]["seconds"] for kind in ONCE_A_STEP if kind in table)
    window = max(plain - once, 0.0) / race.asked.windows
    shares = {f"share_of_{n}_windows": seconds / (once + n * window) for n in (64, 1152)}
    return {"gb_per_s": rate / 1e9, "seconds_a_step": seconds, **shares}


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    backend = kernels.backend(asked.backend)
    device = device_of(backend)
    race, began = Race(backend, asked, device), time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    say(f"ours, first short step: {timed(lambda: race.ours(backend, short=True), race.gpu):.1f} s")
    if race.gpu:
        torch.cuda.empty_cache()
    say(f"stock, first short step: {timed(lambda: race.stock(short=True), race.gpu):.1f} s")
    times: dict[str, list[float]] = {"verbatim": [], "stock bf16": []}
    for _ in range(asked.rounds):
        for name, seconds in times.items():
            seconds.append(race.turn(name))
            say(f"{name}: {seconds[-1]:.3f} s")
    calls, plain = Timed(backend, race.gpu), statistics.median(times["verbatim"])
    instrumented = race.turn("verbatim", calls)
    tokens = asked.windows * race.run.model.seq_len
    ratio = statistics.median(p / o for p, o in zip(times["stock bf16"], times["verbatim"], strict=True))
    memory = {name: round(peak / 1e9, 1) for name, peak in race.peak.items()}
    del race.peer
    gc.collect()
    rates = peaks(backend, device)
    table = breakdown(calls, instrumented, rates)
    return {
        "machine": torch.cuda.get_device_name() if race.gpu else platform.machine(),
        "backend": backend.describe(),
        "parameters": race.run.model.parameter_count(),
        "windows": asked.windows,
        "unit_windows": asked.unit_windows,
        "numerics": race.run.numerics.model_dump(),
        "stock_micro_windows": asked.micro,
        "stock_compiled": race.compiled,
        "seconds": {name: [round(s, 4) for s in seconds] for name, seconds in times.items()},
        "tokens_per_s": {name: round(tokens / statistics.median(seconds)) for name, seconds in times.items()},
        "loss": race.losses,
        "memory_gb": memory,
        "instrumented_seconds": instrumented,
        "rates": rates,
        "kernels": table,
        "share_of_floor": sum(row.get("floor_seconds", 0.0) for row in table.values()) / plain,
        "digests": digest_report(race.digesting(), table, plain, race),
        "step_ratio_to_stock_bf16": round(ratio, 4),
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nvidia")
    parser.add_argument("--windows", type=int, default=32, help="of a step")
    parser.add_argument("--unit-windows", type=int, default=4, help="of a unit of ours")
    parser.add_argument("--weight-gradient-slices", type=int, choices=(1, 2), default=2, help="2 is the default recipe")
    parser.add_argument("--micro", type=int, default=8, help="windows of a micro-batch of the peer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="compile the peer as one graph: minutes rather than one")
    parser.add_argument("--tiny", action="store_true", help="a shape that any machine runs in seconds")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
