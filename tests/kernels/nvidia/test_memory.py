"""The memory plan of a GPU against the backend's own arrays: a unit on tensors without memory, which are counted."""

from __future__ import annotations

import importlib
import pkgutil
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.nvidia as backend
from kernels.nvidia import attention_tiles, digest, tiles
from model import device_memory, memory
from model.memory import KEEP_ALL, PROGRAM, MemoryPlan
from model.spec import NumericsSpec, RunSpec
from model.transformer import network, unit_gradients
from tests.bench.shapes import WIDTHS_1B
from tests.model import tiny

OPEN_1B = WIDTHS_1B | {"layers": 24}
SMALL = {"vocab": 4096, "d_model": 192, "ffn": 512, "heads": 3, "kv_heads": 1, "head_dim": 64, "layers": 6}
LINEARS = OPEN_1B | {"vocab": 64, "ffn": 16384, "layers": 6}  # in short windows a layer's linears take the most,
ATTENTION = {"vocab": 64, "d_model": 256, "ffn": 64, "heads": 64, "kv_heads": 1, "head_dim": 64}  # and here attention
STREAM = MemoryPlan(1, hold_codes=False)


class Counted(TorchDispatchMode):
    """Bytes of the tensors that live now, and the most that lived at once; views of one storage count once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.device.type == "meta":
                storage = x.untyped_storage()
                self._hold(storage._cdata, storage.nbytes(), 1)
                weakref.finalize(x, self._hold, storage._cdata, storage.nbytes(), -1)
        return result

    def _hold(self, storage: int, size: int, change: int) -> None:
        before = self.holders[storage]
        self.holders[storage] += change
        if 0 in (before, self.holders[storage]):
            self.now += change * size
            self.most = max(self.most, self.now)


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's arrays have shapes alone, and nothing is launched."""
    names = [module.name for module in pkgutil.iter_modules(backend.__path__)]
    for module in (backend, *(importlib.import_module(f"kernels.nvidia.{name}") for name in names)):
        if hasattr(module, "DEVICE"):
            monkeypatch.setattr(module, "DEVICE", torch.device("meta"))
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *arguments, **options: None)


def taken(run: RunSpec, plan: MemoryPlan) -> int:
    """The most bytes that weights, sums, codes and the rest of one unit's gradients take at once."""
    m = run.model
    windows = np.zeros((run.numerics.unit_windows, m.seq_len + 1), np.int64)
    with Counted() as counted:
        weights = {name: torch.empty(shape, device="meta") for name, shape in m.shapes().items()}
        sums = {name: backend.new_sums(shape) for name, shape in m.shapes().items()}
        flag = backend.new_flag()
        unit_gradients(network(run, backend, weights, flag, plan), windows, np.float32(1e-4), sums, flag)
    return counted.most


@pytest.mark.parametrize("plan", [KEEP_ALL, STREAM, MemoryPlan(3)], ids=str)
@pytest.mark.parametrize(
    ("shape", "length", "units", "slices"),
    [
        *((OPEN_1B, 4096, 1, 1), (OPEN_1B, 4096, 4, 1), (OPEN_1B, 4096, 8, 2)),
        *((SMALL, 4096, 2, 2), (SMALL, 1000, 1, 1)),
        *((LINEARS, 128, 16, 1), (LINEARS, 128, 16, 2), (ATTENTION, 1024, 8, 1)),
    ],
)
def test_a_unit_takes_no_more_than_was_said_and_not_much_less(
    without_memory: None, plan: MemoryPlan, shape: dict[str, int], length: int, units: int, slices: int
) -> None:
    gradients = {"input_gradient_slices": slices, "weight_gradient_slices": slices}
    numbers = NumericsSpec(**gradients, down_slices=slices, unit_windows=units)
    run = tiny.spec(seq_len=length, window=min(512, length), windows=units, numerics=numbers, **shape)
    said = memory.total(device_memory.needs(run, plan, "unit")) - PROGRAM
    took, pairs = taken(run, plan), device_memory._pairs(run)  # of which there are fewer in layers with a window
    assert took <= said <= took * 1.25 + pairs, f"said {said / 1e6:,.0f} MB, took {took / 1e6:,.0f} MB"


def test_the_budgets_are_the_backend_s() -> None:
    head = importlib.import_module("kernels.nvidia.head")  # in the package that name is the function's
    assert (device_memory.HEAD_BUDGET, device_memory.HEAD_PART) == (head.BUDGET, head.PART)
    backward = importlib.import_module("kernels.nvidia.attention_backward")
    assert (device_memory.PAIRS_BUDGET, device_memory.PAD) == (backward.STORED, attention_tiles.PAD)
    assert device_memory.DIGESTS == 64 * digest.MAX_NODES
    assert (device_memory.WIDEST, device_memory.WIDEST_HEAD) == (tiles.WIDEST, attention_tiles.WIDEST_HEAD)


def test_a_backend_without_a_gpu_names_no_memory() -> None:
    assert backend.device_memory() is None
