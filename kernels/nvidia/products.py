"""Tiles of int8 products in tensor cores, and their values as f32.

Both operands have the contracted index contiguous in memory, as Hopper's int8 instructions want. Rows and columns
beyond a matrix repeat its last one: loops need no masks for them, and a repeated value raises no flag of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Rows

MAX_TERMS = 131_071  # beyond it a sum of 128 · 128 leaves int32


@triton.jit
def tile_of(rows, columns, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """(first row, first column) of this program's tile: GROUP blocks of rows take turns at a block of columns, so that
    the second cache keeps both operands."""
    down, across = tl.cdiv(rows, M), tl.cdiv(columns, N)
    program = tl.program_id(0)
    group = program // (GROUP * across)
    within = program - group * (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + within % height) * M, (within // height) * N


@triton.jit
def value(
    hi, lo, right, first, other, rows, columns, STRIDE: tl.constexpr, INNER: tl.constexpr, SLICES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right), as f32[M, N], of M rows from `first` on of hi and lo
    int8[rows, INNER], which begin STRIDE apart, and N rows from `other` on of right int8[columns, INNER].

    Two slices are one tile of 2M rows, for the compiler waits after every dot of integers. Eight rows of hi and the
    same of lo take turns, so that each pair of sums ends in one thread. INNER is known when a kernel is compiled: a
    model has few widths.
    """
    k, i = tl.arange(0, K), tl.arange(0, SLICES * M)
    row = i if SLICES == 1 else i // 16 * 8 + i % 8
    left = hi if SLICES == 1 else tl.where((i % 16 < 8)[:, None], hi, lo)
    left += tl.minimum(first + row, rows - 1).to(tl.int64)[:, None] * STRIDE + k[None, :]
    column = tl.minimum(other + tl.arange(0, N), columns - 1)
    right += column.to(tl.int64)[:, None] * INNER + k[None, :]
    total = tl.zeros((SLICES * M, N), tl.int32)
    for start in range(0, INNER, K):
        if INNER % K == 0:
            a, b = tl.load(left), tl.load(right)
        else:
            inside = start + k[None, :] < INNER
            a, b = tl.load(left, mask=inside, other=0), tl.load(right, mask=inside, other=0)
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
        left += K
        right += K
    result = total.to(tl.float32)
    if SLICES == 2:
        high, low = tl.split(result.reshape(M // 8, 2, 8, N).permute(0, 2, 3, 1))
        result = (high * 256.0 + low).reshape(M, N)
    return result


def slice_count(x: Rows) -> int:
    """How many slices rows have."""
    return 1 if x.lo is None else 2


def low_slice(x: Rows) -> Tensor:
    """The low slice; where there is none, a tensor that no kernel reads."""
    low: Tensor = x.hi if x.lo is None else x.lo
    return low


def check_terms(*counts: int) -> None:
    """Refuse a contraction that int32 may not hold. Raises ValueError."""
    if max(counts) > MAX_TERMS:
        raise ValueError(
            f"an int8 product over {max(counts)} terms: int32 holds {MAX_TERMS}; check the widths and the unit's tokens"
        )
