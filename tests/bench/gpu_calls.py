"""The calls of a step to a backend: when each began and ended, its class, and what it does at least.

The least work of a call is the operations of its integer products and the bytes of its operands and results, moved
once; scores or logits that a backend makes twice are counted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.interface import AttentionShape, Rows, Weight

CLASSES = {
    "attention forward": ("attention",),
    "attention backward": ("attention_backward",),
    "linears forward": ("project", "project_add"),
    "linears backward": ("linear_backward",),
    "head": ("head", "head_backward"),
    "row-wise": (
        *("embed", "embed_backward", "norm_bf16", "norm_rows", "norm_backward", "quantise_rows"),
        *("rotate_rows", "rotate_backward", "swiglu_rows", "swiglu_backward"),
    ),
    "weights' codes": ("quantise_weight",),
    "optimizer": ("new_sums", "square_rows", "fixed_sum", "adamw"),
    "digests": ("leaves_of",),
    "transfers": ("to_device", "to_host"),
}
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names}
# Operations of a call's integer products, from its arguments: for each pair of query and key attention takes 3 products
# over a head's width, QKᵀ and PV in two slices; its backward 10: QKᵀ, dO·Vᵀ, dQ, dK in 1, 2, 2, 2, and dV in 3.
OPERATIONS: dict[str, Callable[..., float]] = {
    "project": lambda x, w: 2 * slices(x) * len(x.hi) * size(w.hi),
    "project_add": lambda x, w, _residual: 2 * slices(x) * len(x.hi) * size(w.hi),
    "linear_backward": lambda x, parts, n, _flag: 2 * sum(n) * len(x.hi) * sum(size(part.weight.hi) for part in parts),
    "attention": lambda q, _k, _v, shape: 3 * 2 * shape.width * pairs(shape, len(q.hi)),
    "attention_backward": lambda q, *others: 10 * 2 * others[-2].width * pairs(others[-2], len(q.hi)),
    "head": lambda x, w, *_: 2 * 2 * len(x.hi) * size(w.hi),
    "head_backward": lambda x, w, *_: 6 * 2 * len(x.hi) * size(w.hi),
}
# Which arguments are both read and written.
READ_AND_WRITTEN = {"head_backward": (4,), "adamw": (0, 1, 2)}
# Where bytes moved are not those of the arguments: tables of which few rows are touched, and calls that move nothing.
MOVED: dict[str, Callable[..., float]] = {
    "embed": lambda table, tokens: 6 * len(tokens) * table.shape[1],
    "embed_backward": lambda dx, *_: 9 * size(dx),
    "to_device": lambda *_: 0,
    "to_host": lambda *_: 0,
}


class Call(NamedTuple):
    """One call of a backend's function: marks before and after it, and what it does at least."""

    name: str
    before: Any
    after: Any
    operations: float
    size: float


class Timed:
    """A backend that notes for each call when it began and ended, and what it does at least."""

    def __init__(self, backend: ModuleType, gpu: bool) -> None:
        self._backend, self._gpu, self.calls = backend, gpu, list[Call]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._backend, name)
        if name not in CLASS_OF:
            return function

        def call(*arguments: Any) -> Any:
            before = self._mark()
            result = function(*arguments)
            self.calls.append(Call(name, before, self._mark(), *work(name, arguments, result)))
            return result

        return call

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, call: Call) -> float:
        """How long a call took; on a GPU everything must have ended."""
        return call.before.elapsed_time(call.after) / 1e3 if self._gpu else call.after - call.before


def size(x: Any) -> int:
    """Bytes of an array, or of those in a tuple; a weight's second layout is its backend's own affair."""
    if isinstance(x, Weight):
        x = x[:2]
    if isinstance(x, tuple):
        return sum(map(size, x))
    return x.nbytes if isinstance(x, np.ndarray | Tensor) else 0


def work(name: str, arguments: tuple[Any, ...], result: Any) -> tuple[float, float]:
    """(operations of integer products, a multiplication and an addition being two; bytes moved) of a call at least."""
    operations = OPERATIONS[name](*arguments) if name in OPERATIONS else 0
    if name in MOVED:
        return operations, MOVED[name](*arguments)
    again = sum(size(arguments[place]) for place in READ_AND_WRITTEN.get(name, ()))
    sums = sum(size(part.sums) for part in arguments[1]) if name == "linear_backward" else 0
    return operations, size(arguments) + size(result) + again + sums


def slices(rows: Rows) -> int:
    """How many int8 products a product with these rows takes."""
    return 1 if rows.lo is None else 2


def pairs(shape: AttentionShape, rows: int) -> int:
    """How many (query, key) pairs are seen, over all heads and windows; rows are heads × tokens."""
    seen = min(shape.window, shape.sequence)
    return rows // shape.sequence * (shape.sequence * seen - seen * (seen - 1) // 2)
