"""What was handed to a device stays what it was, whatever becomes of the memory that it came from."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import kernels
from kernels import interface
from kernels.digest import tensor_digest
from model import schedule
from model.state import initial_state
from model.step import step
from tests.faults import whole_step
from tests.model import tiny

ROOT = Path(__file__).resolve().parents[2]
GPUS = [f"generic:{name}" for name in ("cuda", "mps", "xpu") if getattr(torch, name).is_available()]
NAMES = [*kernels.HOSTS, "generic:cpu", *GPUS]
DTYPES = (np.float32, np.int64, np.int32, np.int8, np.uint16)


def garbage(size: int) -> None:
    """Take memory like that which was just freed, and leave other bytes in it."""
    held = [np.full(size + odd, 0xA5, np.uint8) for odd in (0, 0, 1, 63, 4097)]
    held += [torch.full((size + odd,), 0x5A, dtype=torch.uint8).numpy() for odd in (0, 1, 4095)]
    del held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writable", [True, False], ids=["own", "read only"])
def test_a_source_freed_after_the_copy(name: str, dtype: type, writable: bool) -> None:
    """A copy that did not wait read host memory which had been freed in the meantime."""
    b = kernels.backend(name)
    for size in (1, 63, 4097, 1_000_003):
        source = np.random.default_rng(size).integers(0, 100, size).astype(dtype)
        source.setflags(write=writable)
        expected = tensor_digest("copy", source)
        there = b.to_device(source)
        del source
        gc.collect()
        garbage(size * np.dtype(dtype).itemsize)
        assert tensor_digest("copy", b.to_host(there)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_shared_only_where_it_is_said(name: str) -> None:
    """Whoever overwrites a source must know whether the device sees it."""
    b: ModuleType = kernels.backend(name)
    source = np.arange(10, dtype=np.float32)
    there = b.to_device(source)
    source[:] = -1
    shared = bool((b.to_host(there) == -1).all())
    assert shared == (name in ("cpu", "reference", "generic:cpu"))
    assert "to_device(array) -> the backend's own, perhaps of the same memory" in str(interface.__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_that_reuses_its_buffer(name: str) -> None:
    """A step keeps nothing of the windows it was given: the loader may overwrite them as soon as it returns."""
    run, b = tiny.spec(), kernels.backend(name)
    state, buffer = initial_state(run, b), np.empty((2, run.model.seq_len + 1), np.int64)
    for _ in range(2):
        plan = schedule.plan(run, state.step)
        buffer[...] = tiny.windows(run, plan.first_window, plan.windows)
        last = step(run, b, state, buffer)
        buffer[...] = -1
        garbage(buffer.nbytes)
    assert whole_step.digests(last) == whole_step.digests(whole_step.record(name))


def test_no_copy_goes_on_behind_the_program_s_back() -> None:
    """Every copy has ended when the call returns: nothing asks for another kind."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("kernels", "model", "storage", "tasks", "flows")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in asynchronous(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def asynchronous(tree: ast.Module) -> Iterator[int]:
    """Lines that ask for a copy which may go on after the call has returned, or for pinned memory, its partner."""
    names = {"non_blocking", "async_", "pin_memory", "memcpy_async", "cudaMemcpyAsync", "to_device_async"}
    for node in ast.walk(tree):
        found = [node.arg] if isinstance(node, ast.keyword) else []
        found += [node.attr] if isinstance(node, ast.Attribute) else []
        found += [node.value] if isinstance(node, ast.Constant) else []
        if names & {name for name in found if isinstance(name, str)}:
            yield getattr(node, "lineno", 0)
        # copy_(source, True), to(device, dtype, True): the flag without its name
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("copy_", "to")
        if call and any(isinstance(a, ast.Constant) and a.value is True for a in node.args):
            yield node.lineno


@pytest.mark.parametrize(
    "planted",
    ["x.to('cuda', non_blocking=True)", "x.copy_(y, True)", "x.pin_memory()", "x.to(**{'non_blocking': True})"],
)
def test_the_check_sees(planted: str) -> None:
    """Each way to such a copy must be found."""
    assert list(asynchronous(ast.parse(planted)))
    assert not list(asynchronous(ast.parse("x.to('cuda').copy_(y)")))
