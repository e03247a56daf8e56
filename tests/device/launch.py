"""Ranks for a check or a measurement on several devices, started by torchrun as a run's are; no Prefect needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from model.ranks import Ranks
from model.spec import RunSpec
from model.state import State, initial_state

ROOT = Path(__file__).resolve().parents[2]
# Reductions inside switches stay off: they are exact for integers, but a fault of theirs takes a host's GPUs away.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def start(module: str, ranks: int, request: dict[str, Any], **environment: str) -> subprocess.Popen[bytes]:
    """`ranks` processes of MODULE, each with the request as its one argument (JSON)."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, **ENVIRONMENT, **environment}
    command = [sys.executable, "-W", "ignore::FutureWarning", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", module, json.dumps(request)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})


def own_state(run: RunSpec, backend: ModuleType, group: Ranks) -> State:
    """This rank's rows of state 0, which every rank draws for itself."""
    whole = initial_state(run, backend)
    rows = group.own
    own = {key: x[rows[name]] for key, x in whole.tensors().items() if (name := key.partition("/")[2]) in rows}
    return State.of(own, whole.scalars()).placed(lambda x: backend.to_device(x.copy()))


def gpus() -> int:
    """How many there are here."""
    return torch.cuda.device_count()


def algorithms(logs: list[Path]) -> Counter[str]:
    """What NCCL says that it chose, counted: "AllReduce TREE" and the like, or its own words where they are others."""
    found: Counter[str] = Counter()
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            words = line.replace(":", " ").split()
            if "Algo" in words and "Bytes" in words:
                found[f"{words[words.index('Bytes') - 2]} {words[words.index('Algo') + 1]}"] += 1
    return found
