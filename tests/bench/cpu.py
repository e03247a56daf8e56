"""`make bench-cpu`: the CPU backend against stock PyTorch, and each kernel against its floor, on this machine.

    python -m tests.bench.cpu [size …]      sizes: 10M 120M

A step is everything from tokens to the digested next state: forward, backward, clipping, AdamW, and here also the state
root. The contenders take turns, one window of 4,096 tokens each, because neighbours change absolute rates by a factor
of two; a ratio is the median over rounds of two times from the same round. Prints two Markdown tables, then one JSON
line.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
import numpy as np
import torch

import kernels
from kernels import digest
from kernels.cpu import products
from model.state import initial_state, root
from model.step import step
from tests.bench import floors
from tests.bench.shapes import SHAPES, TOKENS, spec
from tests.bench.stock import Peer

ROUNDS = 5
HASH_WINDOWS = 16
Contender = Callable[[np.ndarray], object]


def contenders(size: str, peers: dict[str, Peer]) -> dict[str, Contender]:
    """One step on a window i64[1, S + 1], by name: ours by each method that is exact here, and stock PyTorch."""
    run, backend = spec(size), kernels.backend("cpu")
    state = initial_state(run, backend)

    def ours(method: str) -> Contender:
        def take_step(window: np.ndarray) -> None:
            products.use(method)
            step(run, backend, state, window)

        return take_step

    methods = [name for name, function in products.METHODS.items() if products.exact(function)]
    others: dict[str, Contender] = {name: lambda window, peer=peer: peer.step() for name, peer in peers.items()}
    return {**{f"verbatim, {name}": ours(name) for name in methods}, **others}


def race(size: str) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after one round that warms up."""
    peers = {"stock float32": Peer(size, "float32"), "stock bf16": Peer(size, "bfloat16")}
    entrants, random = contenders(size, peers), np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(ROUNDS + 1):
        for name, take_step in entrants.items():
            window = random.integers(0, SHAPES[size]["vocab"], (1, TOKENS + 1))
            began = time.perf_counter()
            take_step(window)
            if number:
                times[name].append(time.perf_counter() - began)
        latest = ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in times.items() if seconds)
        print(f"  {size}: round {number} of {ROUNDS} {latest}", file=sys.stderr, flush=True)
    for peer in peers.values():
        peer.close()
    return times


def ratio(peer: list[float], ours: list[float]) -> float:
    """How many times as fast as the peer: the median of the rounds' own ratios."""
    return statistics.median(p / o for p, o in zip(peer, ours, strict=True))


def hashing(size: str) -> dict[str, float]:
    """Seconds of a step of 16 windows, and of the digests of its gradient and state."""
    run, backend = spec(size, HASH_WINDOWS), kernels.backend("cpu")
    state, kept = initial_state(run, backend), {}
    windows = np.random.default_rng(1).integers(0, run.model.vocab, (HASH_WINDOWS, TOKENS + 1))
    began = time.perf_counter()
    step(run, backend, state, windows, take=kept.update)
    whole = time.perf_counter() - began
    began = time.perf_counter()
    root(state)
    for name, gradient in kept.items():
        digest.tensor_digest(name, gradient)
    hashed = time.perf_counter() - began
    return {"step_seconds": whole, "hash_seconds": hashed, "share": hashed / whole}


def report(size: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each contender, printed as Markdown."""
    parameters, rows = spec(size).model.parameter_count(), []
    for name, seconds in times.items():
        against = {peer: round(ratio(times[peer], seconds), 2) for peer in ("stock float32", "stock bf16")}
        rate = TOKENS / statistics.median(seconds)
        rows.append({"size": size, "parameters": parameters, "contender": name, "tokens_per_s": round(rate), **against})
        print(f"| {size} | {name} | {rate:,.0f} | {against['stock float32']:.2f} | {against['stock bf16']:.2f} |")
    return rows


def main(sizes: list[str]) -> None:
    """Race, floors, hashing; tables and the JSON line."""
    chosen = products.method()
    print("| size | step | tokens/s | × stock float32 | × stock bf16 |\n|---|---|---|---|---|", flush=True)
    races = [row for size in sizes for row in report(size, race(size))]
    products.use(chosen)
    table = floors.measure(sizes[-1])
    hashed = hashing(sizes[-1])
    print(
        f"\nHashing gradient and state: {hashed['hash_seconds']:.2f} s of a step of {HASH_WINDOWS} windows, "
        f"{hashed['step_seconds']:.1f} s: {hashed['share']:.2%}\n"
    )
    machine = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    versions = {"torch": torch.__version__, "numpy": np.__version__, "product": chosen}
    report_line = {"machine": {**machine, **versions}, "race": races, "kernels": table, "hashing": hashed}
    print(json.dumps(report_line))


def _processor() -> str:
    """The name that Linux gives; on other systems Python's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHAPES))
