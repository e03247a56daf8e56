"""Exact int8 products in int32, by the fastest method that proves exact on this machine.

oneDNN (through torch) uses the processor's int8 instructions, but with AVX-512 and no VNNI it saturates, and with AVX2
alone it takes a plain loop, tens of times slower. The other method is torch's float32 products over slices of at most
1,024 terms, whose partial sums stay within 2²⁴ and so are exact in any order. They are timed at start-up, and the
fastest that a probe finds exact is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

MAX_TERMS = 133_144  # beyond it a sum of 127 · 127 leaves int32; one of 128 · 127 beyond 132,104, which no spec allows
SLICE_TERMS = 1024  # 1,024 · 128 · 127 < 2²⁴
PROBE_SHAPES = ((1, 1, 1), (3, 64, 5), (17, 129, 31), (64, 192, 64), (128, 1025, 48), (33, 4096, 65), (5, MAX_TERMS, 3))
TIMED_SIZE = 256
Method = Callable[[np.ndarray, np.ndarray, np.ndarray], None]

_local = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An uninitialised array of this thread, reused by the next call of that name: fresh pages cost more than work."""
    buffers: dict[tuple[str, str], np.ndarray] = _local.__dict__.setdefault("buffers", {})
    size = int(np.prod(shape))
    key = (name, np.dtype(dtype).str)
    if key not in buffers or buffers[key].size < size:
        buffers[key] = np.empty(size, dtype)
    return buffers[key][:size].reshape(shape)


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a int8[M, K] · b int8[K, N] = int32[M, N], into `out` (C-contiguous) if given. a and b may lie by rows or by
    columns (a transpose is a view); only operands with gaps are copied.

    Codes are −127…127, and −128 on one side at most. Raises ValueError on shapes that do not fit or K > 133,144.
    """
    m, k = a.shape
    if b.shape[0] != k or k > MAX_TERMS:
        raise ValueError(f"int8 product of {a.shape} and {b.shape}: inner sizes must agree, at most {MAX_TERMS}")
    if out is None:
        out = np.empty((m, b.shape[1]), np.int32)
    elif out.shape != (m, b.shape[1]) or not out.flags.carray:
        raise ValueError(f"int8 product of {a.shape} and {b.shape} does not fit into {out.shape}, or it has gaps")
    _method(a, b, out)
    return out


def method() -> str:
    """Which method `multiply` uses: "onednn" or "float32"."""
    return next(name for name, function in METHODS.items() if function is _method)


def use(name: str) -> None:
    """Make `multiply` use a method by name; the bits are the same."""
    global _method
    _method = METHODS[name]


def _onednn(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    torch._int_mm(_tensor(a), _tensor(b), out=_tensor(out))


def _tensor(a: np.ndarray) -> torch.Tensor:
    """A view of the array. What has gaps, or may not be written (torch warns of that), is copied.

    NumPy leaves any stride to a dimension of length 1, and with a wrong one there _int_mm reads outside the array:
    the reshapes write the strides anew.
    """
    if not a.flags.forc or not a.flags.writeable:
        a = a.copy()
    if 1 in a.shape:
        a = a.reshape(-1).reshape(a.shape)
    return torch.from_numpy(a)


def _float32(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    left, right, whole = _tensor(a), _tensor(b), _tensor(out)
    part = _tensor(scratch("float32 part", out.shape, np.float32))
    for start in range(0, a.shape[1], SLICE_TERMS):
        stop = min(start + SLICE_TERMS, a.shape[1])
        torch.mm(left[:, start:stop].float(), right[start:stop].float(), out=part)
        if start == 0:
            whole.copy_(part)
        else:
            whole.add_(part.to(torch.int32))


METHODS: dict[str, Method] = {"onednn": _onednn, "float32": _float32}


def exact(candidate: Method) -> bool:
    """Whether a method is exact where wrong ones fail: extremes, random codes, small, odd and long shapes."""
    random = np.random.default_rng(0)
    for m, k, n in PROBE_SHAPES:
        out = np.empty((m, n), np.int32)
        for x, y in ((127, 127), (-127, 127), (-127, -127), (-128, 127), (-128, -127)):
            if k * abs(x * y) < 2**31:
                candidate(np.full((m, k), x, np.int8), np.full((k, n), y, np.int8), out)
                if np.any(out != k * x * y):
                    return False
        a, b = (random.integers(-127, 128, shape).astype(np.int8) for shape in ((m, k), (k, n)))
        right = a.astype(np.float64) @ b.astype(np.float64)  # sums below 2⁵³ are exact
        for left, other in ((a, b), (np.asfortranarray(a), b), (a, np.asfortranarray(b))):
            candidate(left, other, out)
            if np.any(out != right):
                return False
    return True


def fastest() -> Method:
    """The fastest method that is exact here. Raises RuntimeError if none is: this machine cannot train or audit."""
    for candidate in sorted(METHODS.values(), key=_seconds):  # timing takes a tenth of the probe, at every start
        if exact(candidate):
            return candidate
    raise RuntimeError("no int8 product is exact on this machine: use the reference backend, check memory and BLAS")


def _seconds(candidate: Method) -> float:
    """What a product of TIMED_SIZE takes, in seconds: the best of a few, for a busy machine."""
    a, out = np.ones((TIMED_SIZE, TIMED_SIZE), np.int8), np.empty((TIMED_SIZE, TIMED_SIZE), np.int32)

    def once() -> float:
        began = time.perf_counter()
        candidate(a, a, out)
        return time.perf_counter() - began

    return min(once() for _ in range(4))


_method: Method = fastest()
