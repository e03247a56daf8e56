"""A step of the 1.608 B shape by several GPUs of a machine, beside stock PyTorch's data parallel in the same run.

    python -m tests.bench.gpu_scale 1 2 [4 8] [--windows 64] [--recipe 1152]
    python -m tests.bench.gpu_scale 1 2 --tiny --backend cpu      # does it run at all? no GPU needed

For each number of GPUs n, everything from tokens to the digested next state, with and without digests:

    strong   a step of 64 windows, shared           weak   of 64 windows a GPU           recipe   of 1,152, shared

The peer is gpu_stock.py's under DistributedDataParallel, bf16 gradients all-reduced in its own buckets while the last
micro-batch is differentiated. A step's time is a + b·windows: what was not timed, one GPU's step of 1,152 windows and
the peer's, is told from two batches that were. On one GPU ours and the peer run side by side, each on its own, where
there are two. Prints a line for each time, a Markdown table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kernels
from model.group import ALONE, Digested, Group, Kind, LeavesOf
from model.ranks import Ranks, launched, take_gpu
from model.spec import NumericsSpec
from model.state import initial_state
from model.step import step
from model.transformer import network
from tests.bench.gpu_stock import Trainer, device_of, parameters_of
from tests.bench.shapes import OPEN_1B, TINY, run_of
from tests.device import launch

UNIT = 4  # windows of a unit of ours
NUMERICS = NumericsSpec(unit_windows=UNIT)
MICRO = 8  # and of a micro-batch of the peer
LONGER = 4  # times the windows of a shared step: the second of two batches that tell a step's time


class Measured:
    """A group whose digests are timed, or left out."""

    def __init__(self, group: Any) -> None:
        self.group, self.digesting, self.taken = group, True, defaultdict[str, float](float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def digests(self, own: Mapping[str, Any], leaves_of: LeavesOf, kind: Kind) -> Digested:
        """What the group says; or of every tensor nothing."""
        if not self.digesting:
            return {name: "00" * 32 for name in own}, ()
        finish()
        began = time.perf_counter()
        found: Digested = self.group.digests(own, leaves_of, kind)
        self.taken["digests"] += time.perf_counter() - began
        return found


def finish() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> float:
    """Seconds of what all ranks do, from when the last begins to when the last is done."""

    def meet() -> None:
        finish()
        if dist.is_initialized():
            dist.barrier()

    meet()
    began = time.perf_counter()
    call()
    meet()
    return time.perf_counter() - began


class Log:
    """What rank 0 measured: it says so at once, and keeps it in the file that was asked for."""

    def __init__(self, request: dict[str, Any], rank: int) -> None:
        self.request, self.rank, self.began = request, rank, time.perf_counter()
        self.times: dict[str, list[float]] = defaultdict(list)
        self.rest: dict[str, Any] = {}

    def add(self, name: str, seconds: float) -> None:
        """One more time."""
        self.times[name].append(seconds)
        if self.rank:
            return
        Path(self.request["file"]).write_text(json.dumps({"times": self.times, **self.rest}))
        at, who = time.perf_counter() - self.began, f"{self.request['gpus']} × {self.request['what']}"
        print(f"  {at:6.1f} s  {who}, {name}: {seconds:.3f} s", file=sys.stderr, flush=True)


def batches(request: dict[str, Any]) -> dict[str, int]:
    """Windows of each kind of step."""
    n, windows = request["gpus"], request["windows"]
    found = {"strong": windows} | ({"weak": n * windows} if n > 1 else {})
    return found | (
        {"recipe": request["recipe"]} if n > 1 and request["what"] == "ours" else {"longer": LONGER * windows}
    )


def windows_of(request: dict[str, Any], count: int) -> np.ndarray:
    """Windows i64[count, S + 1] of drawn tokens."""
    model = TINY if request["tiny"] else OPEN_1B
    return np.random.default_rng(0).integers(0, model.vocab, (count, model.seq_len + 1))


def ours(request: dict[str, Any]) -> None:
    """One rank of ours."""
    with launched(request["backend"]) as rank:
        backend, model = kernels.backend(request["backend"]), TINY if request["tiny"] else OPEN_1B
        runs = {name: run_of(model, count, NUMERICS) for name, count in batches(request).items()}
        warm = run_of(model, UNIT * request["gpus"], NUMERICS)
        group: Any = Measured(Ranks(backend, model) if request["gpus"] > 1 else ALONE)
        if request["gpus"] > 1:
            state = launch.own_state(warm, backend, group.group)
        else:
            state = initial_state(warm, backend).placed(backend.to_device)
        log = Log(request, rank)

        def once(name: str, run: Any, count: int) -> None:
            found: list[Any] = []
            drawn = windows_of(request, count)
            seconds = timed(lambda: found.append(step(run, backend, state, drawn, group=group)))
            if found[0].loss is None:
                raise SystemExit("the step was not finite: nothing was measured")
            log.add(f"{name}{'' if group.digesting else ', no digests'}", seconds)
            if group.digesting:
                log.rest[name] = dict(group.taken) | _of_ranks(group.group)

        for name in ("first", "warm"):
            once(name, warm, UNIT * request["gpus"])
        for name, run in runs.items():
            for digesting in (True,) if name in ("recipe", "longer") else (True, False, True, False):
                group.digesting = digesting
                _forget(group)
                once(name, run, batches(request)[name])
        group.digesting = True
        log.add("weights", timed(lambda: network(warm, backend, state.weights, backend.new_flag(), group=group)))


def _forget(group: Any) -> None:
    group.taken.clear()
    if isinstance(group.group, Ranks):
        group.group.seconds.clear()
        group.group.sent.clear()


def _of_ranks(group: Group) -> dict[str, Any]:
    if not isinstance(group, Ranks):
        return {}
    return {"reduce": group.seconds["gradients"], "waiting": group.seconds["waiting"], "sent": dict(group.sent)}


class Parallel(Trainer):
    """The peer, its gradients averaged over ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch._dynamo.config.optimize_ddp = False  # it cuts graphs by buckets, and has no flex attention
        devices = [self.device.index] if self.device.type == "cuda" else None
        self.loss = DistributedDataParallel(
            self.model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Gradients travel with the last."""
        apart: AbstractContextManager[None] = nullcontext() if last else self.loss.no_sync()
        return apart


def stock(request: dict[str, Any]) -> None:
    """One rank of the peer."""
    gpu, rank = request["backend"] == "nvidia", 0
    if dist.is_torchelastic_launched():
        if gpu:
            take_gpu(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
        rank = dist.get_rank()
    backend, model = kernels.backend(request["backend"]), TINY if request["tiny"] else OPEN_1B
    run = run_of(model, request["windows"], NUMERICS)
    weights = initial_state(run, backend).weights
    parameters = parameters_of(backend, weights, device_of(backend), torch.bfloat16)
    kind = Parallel if request["gpus"] > 1 else Trainer
    peer = kind(run, parameters, MICRO, "blocks" if gpu else "no")
    del weights, parameters
    log = Log(request, rank)
    for name, count in {
        "first": MICRO * request["gpus"],
        "warm": 2 * MICRO * request["gpus"],
        **batches(request),
    }.items():
        take_step = partial(peer.step, windows_of(request, count)[rank :: request["gpus"]])
        for _ in range(1 if name in ("first", "longer") else 2):
            log.add(name, timed(take_step))
    if dist.is_initialized():
        dist.destroy_process_group()


def straight(times: Mapping[str, list[float]], windows: int, asked: int) -> float:
    """Seconds of a step of `asked` windows on a line through two batches that were timed."""
    short, long = (statistics.median(times[name]) for name in ("strong", "longer"))
    slope = (long - short) / ((LONGER - 1) * windows)
    return short + slope * (asked - windows)


def figures(found: dict[int, dict[str, Any]], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of GPUs and contender."""
    rows = []
    for n, both in found.items():
        for what, report in both.items():
            times = {name: statistics.median(seconds) for name, seconds in report["times"].items()}
            if "recipe" not in times:
                times["recipe"] = straight(report["times"], asked.windows, asked.recipe)
                times["recipe is told from two batches"] = 1.0
            times.setdefault("weak", times["strong"])
            times.setdefault("weak, no digests", times.get("strong, no digests", times["strong"]))
            row: dict[str, Any] = {"gpus": n, "what": what, "seconds": times}
            rows.append(row | {name: report[name] for name in ("strong", "weak", "recipe") if name in report})
    for row in rows:
        one = next((r["seconds"] for r in rows if r["gpus"] == 1 and r["what"] == row["what"]), None)
        if one:
            n, own = row["gpus"], row["seconds"]
            efficiency = {"strong": one["strong"] / n / own["strong"], "weak": one["strong"] / own["weak"]}
            row["efficiency"] = efficiency | {"recipe": one["recipe"] / n / own["recipe"]}
    return rows


def table(rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """Tokens a second and efficiency, and what shares of a step went to digests and to the integer reduce."""
    length = (TINY if asked.tiny else OPEN_1B).seq_len
    print("| GPUs | | batch | windows | tokens/s | efficiency | without digests | digests | integer reduce | waiting |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = {"strong": asked.windows, "weak": asked.windows * row["gpus"], "recipe": asked.recipe}
        for name, count in sizes.items():
            seconds, rest = row["seconds"][name], row.get(name, {})
            plain = row["seconds"].get(f"{name}, no digests")
            cells = [row["gpus"], row["what"], name, count, f"{count * length / seconds:,.0f}"]
            cells += [f"{row['efficiency'][name]:.1%}" if "efficiency" in row else ""]
            cells += [f"{count * length / plain:,.0f}" if plain and row["what"] == "ours" else ""]
            cells += [f"{rest[key] / seconds:.2%}" if key in rest else "" for key in ("digests", "reduce", "waiting")]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of GPUs in turn."""
    found: dict[int, dict[str, Any]] = {}
    folder = tempfile.mkdtemp(prefix="scale")
    plain = {"backend": asked.backend, "tiny": asked.tiny, "windows": asked.windows, "recipe": asked.recipe}
    for n in asked.gpus:
        beside = n == 1 and launch.gpus() > 1
        running, found[n] = [], {}
        for what, seen in (("ours", "0"), ("stock", "1")):
            request = plain | {"gpus": n, "what": what, "file": f"{folder}/{n}.{what}.json"}
            environment = {"CUDA_VISIBLE_DEVICES": seen} if beside else {}
            running.append((request, launch.start("tests.bench.gpu_scale", n, request, **environment)))
            if not beside:
                running[-1][1].wait()
        for request, process in running:
            if process.wait() == 0 or Path(request["file"]).exists():
                found[n][request["what"]] = json.loads(Path(request["file"]).read_text())
            print(f"{n} × {request['what']}: exit code {process.returncode}", file=sys.stderr, flush=True)
        print(json.dumps({"gpus": n, **found[n]}), flush=True)
    return figures(found, asked)


def main() -> None:
    """Measure what the command line asks for; or be a rank of it."""
    if dist.is_torchelastic_launched():
        request = json.loads(sys.argv[1])
        {"ours": ours, "stock": stock}[request["what"]](request)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, nargs="+")
    parser.add_argument("--backend", default="nvidia")
    parser.add_argument("--windows", type=int, default=64, help="of a shared step, or of each GPU's part")
    parser.add_argument("--recipe", type=int, default=1152, help="windows of a step of the recipe's main phase")
    parser.add_argument("--tiny", action="store_true", help="a shape that any machine runs in seconds")
    asked = parser.parse_args()
    rows = measure(asked)
    table(rows, asked)
    machine = torch.cuda.get_device_name() if launch.gpus() else asked.backend
    print(
        json.dumps({"machine": machine, "numerics": NUMERICS.model_dump(), "stock_micro_windows": MICRO, "rows": rows})
    )


if __name__ == "__main__":
    main()
