"""Kernels that each break one rule of the static check, and one that breaks none.

    python -m tests.kernels.nvidia.offences    prints {kernel: findings} as JSON

A process of its own, since the tests run in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import importlib
import json

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.kernels.nvidia import ptx

LANES = tl.constexpr(32)


@triton.jit
def fused(x, y, n):
    v = tl.load(x + tl.arange(0, LANES))
    tl.store(y + tl.arange(0, LANES), v * v + v)


@triton.jit
def explicit_fma(x, y, n):
    v = tl.load(x + tl.arange(0, LANES))
    tl.store(y + tl.arange(0, LANES), tl.fma(v, v, v))


@triton.jit
def approximate_exp(x, y, n):
    tl.store(y + tl.arange(0, LANES), tl.exp(tl.load(x + tl.arange(0, LANES))))


@triton.jit
def approximate_division(x, y, n):
    v = tl.load(x + tl.arange(0, LANES))
    tl.store(y + tl.arange(0, LANES), 1.0 / v)


@triton.jit
def flushed_root(x, y, n):
    tl.store(y + tl.arange(0, LANES), libdevice.sqrt_rn(tl.load(x + tl.arange(0, LANES))))


@triton.jit
def double(x, y, n):
    v = tl.load(x + tl.arange(0, LANES)).to(tl.float64)
    tl.store(y + tl.arange(0, LANES), (v * v + 3.0).to(tl.float32))


@triton.jit
def reduced(x, y, n):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, LANES)), 0))


@triton.jit
def largest(x, y, n):
    tl.store(y, tl.max(tl.load(x + tl.arange(0, LANES)), 0))


@triton.jit
def scanned(x, y, n):
    tl.store(y + tl.arange(0, LANES), tl.cumsum(tl.load(x + tl.arange(0, LANES)), 0))


@triton.jit
def multiplied(x, y, n):
    at = tl.arange(0, LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(y + at, tl.dot(tl.load(x + at), tl.load(x + at), input_precision="ieee"))


@triton.jit
def added_atomically(x, y, n):
    tl.atomic_add(y, tl.load(x))


@triton.jit
def carried_by_for(x, y, n):
    total = tl.zeros((LANES,), tl.float32)
    for i in range(n):
        total += tl.load(x + i * LANES + tl.arange(0, LANES))
    tl.store(y + tl.arange(0, LANES), total)


@triton.jit
def carried_by_while(x, y, n):
    """The sum passes through a branch, another variable and its bits."""
    total, other, i = 0, 0.0, 0
    while i < n:
        if i > 3:
            other = total.to(tl.float32, bitcast=True) + tl.load(x + i)
        total = other.to(tl.int32, bitcast=True)
        i += 1
    tl.store(y, other)


@triton.jit
def carried_by_the_outer_loop(x, y, n):
    total = 0.0
    for _ in range(n):
        part = total
        for j in range(n):
            part = tl.where(tl.load(x + j) > 0.0, part, 0.0)
        total = part * 3.0
    tl.store(y, total)


@triton.jit
def innocent(x, y, n):
    """Exact arithmetic, an integer sum of rounded floats, a maximum of bits, and a float carried without arithmetic."""
    total, last = tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.float32)
    for i in range(n):
        v = tl.load(x + i * LANES + tl.arange(0, LANES))
        total += (tl.div_rn(v, 3.0) * 1024.0 + tl.sqrt_rn(v)).to(tl.int64)
        last = tl.where(v > last, v, last)
    top = tl.max(last.to(tl.int32, bitcast=True), 0)
    tl.store(y + tl.arange(0, LANES), (total + top).to(tl.float32) - last)


KERNELS = {
    *(fused, explicit_fma, approximate_exp, approximate_division, flushed_root, double, reduced, largest),
    *(scanned, multiplied, added_atomically, carried_by_for, carried_by_while, carried_by_the_outer_loop, innocent),
}


def main() -> None:
    ptx.modules()
    launch = importlib.import_module("kernels.nvidia.numbers").launch
    x, y = ptx.meta((4096,)), ptx.meta((4096,))
    found: dict[str, list[str]] = {}
    with ptx.compiling((90,)) as compiled:
        for kernel in KERNELS - {fused}:
            launch(kernel, (1,), x, y, 7)
        fused[(1,)](x, y, 7)
    for one in compiled:
        found[one.name.split(".")[-1]] = ptx.findings(one)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
