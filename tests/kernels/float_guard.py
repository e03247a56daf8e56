"""A guard that makes any sum of floats raise while real code runs: NumPy through a profiler, torch by dispatch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numba
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ARRAY_METHODS = {"sum", "mean", "dot", "cumsum", "trace", "var", "std", "prod"}
FUNCTIONS = {"c_einsum", "dot", "vdot", "inner", "correlate", "convolve", "bincount"}
SUMMING_UFUNCS = (np.add, np.subtract, np.matmul)
TORCH_SUMS = {
    *("sum", "mean", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "cumsum", "norm", "var", "std"),
    *("linear", "convolution", "einsum", "_softmax", "_log_softmax", "logsumexp", "index_add", "index_add_"),
    *("scatter_add", "scatter_add_", "nansum", "trace", "linalg_vector_norm", "native_layer_norm", "prod"),
}
EXACT = 2.0**24  # integers up to here are exact in float32, and so is every sum of them that stays below


class FloatSum(AssertionError):
    """A float was about to be summed over an index."""


@contextmanager
def forbidden() -> Iterator[Counter[str]]:
    """Within the block any sum of floats over an index raises FloatSum; yields how many exact products there were.

    Only this thread is seen, so the CPU backend's blocks, which workers would take, run in it.
    """
    before, threads = sys.getprofile(), numba.get_num_threads()
    numba.set_num_threads(1)
    sys.setprofile(_on_event)
    try:
        with _Torch() as guard:
            yield guard.products
    finally:
        sys.setprofile(before)
        numba.set_num_threads(threads)


def _on_event(frame: FrameType, event: str, called: Any) -> None:
    if event != "c_call":
        return
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, np.ndarray) and name in ARRAY_METHODS:
        # `sum` and `mean` arrive here before NumPy looks at dtype=; their `reduce` is judged below.
        wrong = owner.dtype.kind == "f" and name not in ("sum", "mean")
    elif isinstance(owner, np.ufunc):
        wrong = owner in SUMMING_UFUNCS and name in ("reduce", "accumulate", "reduceat") and _float_reduction(frame)
    else:
        wrong = name in FUNCTIONS and getattr(called, "__module__", "").startswith("numpy")
    if wrong:
        raise FloatSum(f"{name} on floats, called from {frame.f_code.co_filename}:{frame.f_lineno}")


def _float_reduction(frame: FrameType) -> bool:
    """NumPy's own helpers hold the array as `obj` or `a`, the type asked for as `dtype`; anything else is suspect."""
    local = frame.f_locals
    array = local.get("obj", local.get("a"))
    if not isinstance(array, np.ndarray):
        return True
    asked = local.get("dtype")
    return np.dtype(array.dtype if asked is None else asked).kind == "f"


class _Torch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        floats = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if name in TORCH_SUMS and floats:
            if name != "mm" or not _exact_product(*args[:2]):
                raise FloatSum(f"torch {name} on {floats[0].dtype}{tuple(floats[0].shape)}")
            self.products[name] += 1
        return func(*args, **(kwargs or {}))


def _exact_product(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if a·b sums small whole numbers whose partial sums all stay exact, in any order."""
    whole = bool((a == a.round()).all()) and bool((b == b.round()).all())
    return whole and a.shape[1] * float(a.abs().max()) * float(b.abs().max()) <= EXACT
