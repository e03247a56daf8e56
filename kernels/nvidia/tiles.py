"""Tiles of whole rows: how a row-wise kernel of this package cuts its work into programs.

A program takes ROWS rows of WIDTH values, padded to BLOCK, the next power of two: every row is read once and stays in
registers. Narrow rows share a program, so that none has too little to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.nvidia.numbers import ceil_log2, reciprocal

WIDEST = 16_384  # the widest row that one program holds in registers


def next_power(n: int) -> int:
    """The smallest power of two ≥ n, for n ≥ 1."""
    return 1 << ceil_log2(n)


def previous_power(n: int) -> int:
    """The largest power of two ≤ n; 0 for 0."""
    return next_power(n + 1) // 2


def row_tile(width: int, values: int, lane: int) -> dict[str, int]:
    """ROWS, BLOCK and num_warps of tiles of about `values` values, `lane` of them to a thread.

    ValueError where a row is wider than WIDEST.
    """
    if width > WIDEST:
        raise ValueError(f"a row of {width} values: a program holds {WIDEST:,} at most")
    block = next_power(width)
    rows = max(1, values // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // (32 * lane)))}


def mean_over(terms: int) -> dict[str, float]:
    """What a mean over so many terms takes: MEAN, to multiply their fixed sum by, and LOG_TERMS, of that sum."""
    return {"MEAN": reciprocal(terms), "LOG_TERMS": ceil_log2(terms)}


@triton.jit
def rows_of_tile(count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(row numbers i32[ROWS], columns i32[BLOCK], offsets i64[ROWS, BLOCK], what lies inside) of this program's
    tile of a matrix [count, WIDTH]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return row, column, place, (row < count)[:, None] & (column < WIDTH)[None, :]
