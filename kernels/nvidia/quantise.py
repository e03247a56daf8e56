"""Quantisers: rows and weights become integers with one scale each. Definition: kernels/reference/quantise.py.

A row is read once and quantised in registers. A weight is written twice, as it is and transposed: the products of the
backward want their contracted index contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Rows, Weight
from kernels.nvidia.codes import store_codes
from kernels.nvidia.numbers import (
    CODE_1,
    ROW_FLOOR,
    absolute,
    checked_top,
    code_of,
    empty,
    f32_of_bf16,
    fixed_sum_rows,
    i32_of_small,
    inverse_of,
    launch,
    magnitude,
    scale_of,
)
from kernels.nvidia.tiles import mean_over, row_tile, rows_of_tile
from kernels.nvidia.transpose import transposed

ROW_VALUES, ROW_LANE = 2048, 16  # of a program, of a thread
WEIGHT_VALUES, WEIGHT_LANE = 2048, 16
LSQ_STEP = tl.constexpr(float.fromhex("0x1.6b7612p-3"))  # 2 / √127, rounded once


def empty_rows(count: int, width: int, slices: int) -> Rows:
    """Uninitialised Rows[count, width]."""
    hi = empty((count, width), torch.int8)
    return Rows(hi, torch.empty_like(hi) if slices == 2 else None, empty((count,), torch.float32))


@triton.jit
def store_rows(x, hi, lo, scale, flag, row, place, inside, count, SLICES: tl.constexpr):
    """Quantise a tile f32[R, C] of whole rows, 0 where padded, and store codes and scales."""
    top = checked_top(tl.max(magnitude(x), 1), flag)
    tl.store(scale + row, scale_of(top, SLICES), mask=row < count)
    store_codes(code_of(x, inverse_of(top, SLICES)[:, None]), hi, lo, place, inside, SLICES)


@triton.jit
def _quantise_rows(
    x, hi, lo, scale, flag, count, WIDTH: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program quantises ROWS rows."""
    row, _, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    values = f32_of_bf16(tl.load(x + place, mask=inside, other=0))
    store_rows(values, hi, lo, scale, flag, row, place, inside, count, SLICES)


def quantise_rows(x: Tensor, slices: int, flag: Tensor) -> Rows:
    """Rows of x bf16[R, C], C ≤ 16,384. Definition: kernels/reference/quantise.py."""
    count, width = x.shape
    rows = empty_rows(count, width, slices)
    tile = row_tile(width, ROW_VALUES, ROW_LANE)
    grid = (triton.cdiv(count, tile["ROWS"]),)
    launch(_quantise_rows, grid, x, *rows, flag, count, WIDTH=width, SLICES=slices, **tile)
    return rows


@triton.jit
def _quantise_weight(
    w,
    hi,
    scale,
    flag,
    count,
    WIDTH: tl.constexpr,
    LSQ: tl.constexpr,
    MEAN: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program quantises ROWS rows by the rule "lsq" or "max"."""
    row, _, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    values = tl.load(w + place, mask=inside, other=0.0)
    top = checked_top(tl.max(magnitude(values), 1), flag)
    if LSQ:
        mean = fixed_sum_rows(absolute(values), LOG_TERMS, flag) * MEAN
        step = tl.where(top >= ROW_FLOOR, mean * LSQ_STEP, 0.0)
        inverse = tl.where(step > 0.0, tl.div_rn(1.0, tl.where(step > 0.0, step, 1.0)), 0.0)
    else:
        step, inverse = scale_of(top, 1), inverse_of(top, 1)
    ratio = tl.where(inverse[:, None] > 0.0, values * inverse[:, None], 0.0)
    code = i32_of_small(tl.minimum(tl.maximum(ratio, -CODE_1), CODE_1))
    tl.store(hi + place, code.to(tl.int8), mask=inside)
    tl.store(scale + row, step, mask=row < count)


def quantise_weight(w: Tensor, rule: str, flag: Tensor) -> Weight:
    """A weight f32[O, I], I ≤ 16,384, as int8 rows by the rule "max" or "lsq"; its layout is the transpose int8[I, O].

    Definition: kernels/reference/quantise.py. ValueError for another rule.
    """
    if rule not in ("max", "lsq"):
        raise ValueError(f"weight scale rule {rule!r}: it is one of ('max', 'lsq')")
    count, width = w.shape
    hi, scale = empty((count, width), torch.int8), empty((count,), torch.float32)
    tile = row_tile(width, WEIGHT_VALUES, WEIGHT_LANE)
    numbers = {"LSQ": rule == "lsq", **mean_over(width)}
    launch(
        _quantise_weight, (triton.cdiv(count, tile["ROWS"]),), w, hi, scale, flag, count, WIDTH=width, **numbers, **tile
    )
    return weight_of(hi, scale)


def weight_of(hi: Tensor, scale: Tensor) -> Weight:
    """A weight from its codes and scales, with the layout that this backend wants."""
    return Weight(hi, scale, transposed(hi))
