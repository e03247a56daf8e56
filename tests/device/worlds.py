"""One trajectory from 1, 2, … GPUs of a machine: the records of tests/device/entries, which processors made too.

    python -m tests.device.worlds {small,full} [--gpus 2] [--backend nvidia] [--steps N]

small, 120 steps: from one GPU; from each number of GPUs (powers of 2) by the reduce-scatter that training uses, NCCL
told to take rings; and one trajectory that changes from 1 to 2 to … to 1 GPU, whose sums are all-reduced, NCCL told to
take trees. full, 3 steps of the 1.608 B shape: from each number of GPUs. Every loss, norm, gradient root and state root
must be the committed one's. Without a GPU: --backend cpu --gpus 2 does the same by processes over gloo.

Prints a line for each part, then one JSON line; exits 1 where a record differs or a process failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import kernels
from model.ranks import Ranks, launched
from model.schedule import plan
from model.state import State
from model.step import step
from model.wire import Device
from tests.device import launch, steps

ENTRIES = Path(__file__).with_name("entries")
COMMITTED = {"small": "small.jsonl", "full": "full.xeon.jsonl"}
RING, TREE = "ring", "ring;allreduce:tree"  # NCCL has trees for all-reduce alone


class AllReduced(Device):
    """Sums that are all-reduced whole, of which each rank keeps its piece: more bytes, but NCCL has trees for it."""

    def reduce_scatter(self, flat: Tensor, counts: list[int]) -> Tensor:
        """Integers: in whichever order they are added, the sum is the same."""
        dist.all_reduce(flat, group=self.group)
        rank = dist.get_rank()
        return flat[sum(counts[:rank]) :][: counts[rank]].clone()


def rank_main(part: dict[str, Any]) -> None:
    """One rank of a part: its steps from state 0 or a saved one; rank 0 writes records, and the state asked for."""
    with launched(part["backend"]) as rank:
        run, backend = steps.spec(part["size"]), kernels.backend(part["backend"])
        group = Ranks(backend, run.model)
        if part["all_reduce"]:
            device, over = (group.wire.device, getattr(group.wire, "group", dist.group.WORLD))
            group.wire = AllReduced(device, over)
        if part["first"]:
            state = group.scattered(_load(part["state"]) if rank == 0 else None)
        else:
            state = launch.own_state(run, backend, group)
        with Path(part["file"]).open("w", encoding="utf-8") if rank == 0 else open("/dev/null", "w") as out:
            for number in range(part["first"], part["last"]):
                began, at = time.monotonic(), plan(run, number)
                done = step(run, backend, state, steps.windows(run, at.first_window, at.windows), group=group)
                line = {field: getattr(done, field) for field in steps.COMPARED}
                print(json.dumps(line | {"seconds": round(time.monotonic() - began, 3)}), file=out, flush=True)
                if number + 1 == part["save_after"]:
                    whole = group.gathered(state)
                    if whole is not None:
                        _save(part["save"], whole)


def _save(name: str, state: State) -> None:
    np.savez(name, scalars=json.dumps(state.scalars()), **state.tensors())


def _load(name: str) -> State:
    tensors = dict(np.load(name))
    return State.of(tensors, json.loads(str(tensors.pop("scalars"))))


def differing(file: Path, committed: list[dict[str, Any]], first: int, last: int) -> list[tuple[int, str]]:
    """(step, field) of every record that is not the committed one; or that there are fewer or more."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    wrong = [
        (expected["step"], field)
        for record, expected in zip(found, committed[first:last], strict=False)
        for field in steps.COMPARED
        if record[field] != expected[field]
    ]
    return wrong if len(found) == last - first else [*wrong, (len(found), f"steps instead of {last - first}")]


class Check:
    """The parts of a check, one after the other."""

    def __init__(self, size: str, backend: str, count: int) -> None:
        self.size, self.backend, self.count = size, backend, count
        self.began, self.report = time.monotonic(), list[dict[str, Any]]()
        lines = (ENTRIES / COMMITTED[size]).read_text(encoding="utf-8").splitlines()
        self.committed = [json.loads(line) for line in lines]
        self.folder = Path(tempfile.mkdtemp(prefix="worlds"))

    def part(
        self, gpus: int, algorithm: str, first: int = 0, last: int | None = None, save_after: int | None = None
    ) -> None:
        """Steps first … last − 1 by so many GPUs; the state that a later part begins with is kept in the folder."""
        name, last = f"{len(self.report)}", last or self.count
        request = {"size": self.size, "backend": self.backend, "first": first, "last": last}
        request |= {"file": f"{self.folder}/{name}.jsonl", "all_reduce": algorithm == TREE}
        request |= {"state": f"{self.folder}/{first}.npz"}
        request |= {"save": f"{self.folder}/{save_after}.npz", "save_after": save_after}
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{self.folder}/{name}.%p.log"}
        status = launch.start("tests.device.worlds", gpus, request, NCCL_ALGO=algorithm, **log).wait()
        wrong = differing(Path(request["file"]), self.committed, first, last)
        chosen = launch.algorithms(list(self.folder.glob(f"{name}.*.log")))
        result = {
            "gpus": gpus,
            "steps": [first, last],
            "nccl_algo": algorithm,
            "exit_code": status,
            "differing": wrong[:5],
        }
        self.report.append(result | {"nccl_chose": dict(chosen)})
        said = f"differs: {wrong[:5]}" if wrong else "every record equal"
        said += f", exit code {status}" if status else ""
        seconds = time.monotonic() - self.began
        print(
            f"{seconds:6.1f} s  {self.size}, steps {first} to {last - 1}, {gpus} GPUs, {algorithm}: {said}", flush=True
        )
        print(f"          NCCL chose {dict(chosen) or 'nothing that it tells'}", flush=True)

    def small(self, most: int) -> None:
        """From each number of GPUs, then one trajectory that changes it."""
        sizes = powers(most)
        chain = [*sizes, 1] if most > 1 else [1, 1]
        cuts = [self.count * i // len(chain) for i in range(len(chain) + 1)]
        self.part(1, RING, save_after=cuts[1])
        for size in sizes[1:]:
            self.part(size, RING)
        for size, first, last in zip(chain[1:], cuts[1:], cuts[2:], strict=False):
            self.part(size, TREE, first, last, save_after=last)

    def full(self, most: int) -> None:
        """From each number of GPUs but one, whose records are the committed ones."""
        for size in powers(most)[1:] or [1]:
            self.part(size, RING)


def powers(most: int) -> list[int]:
    """1, 2, 4, … up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def main() -> int:
    """The check; or, where torchrun started this, a rank of one of its parts."""
    if dist.is_torchelastic_launched():
        rank_main(json.loads(sys.argv[1]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("small", "full"))
    parser.add_argument("--gpus", type=int, default=launch.gpus())
    parser.add_argument("--backend", default="nvidia")
    parser.add_argument("--steps", type=int)
    asked = parser.parse_args()
    check = Check(asked.size, asked.backend, asked.steps or steps.STEPS[asked.size])
    getattr(check, asked.size)(asked.gpus)
    good = not any(part["differing"] or part["exit_code"] for part in check.report)
    machine = torch.cuda.get_device_name() if launch.gpus() else asked.backend
    print(json.dumps({"machine": machine, "size": asked.size, "equal": good, "parts": check.report}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
