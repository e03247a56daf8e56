"""Fixed sums, gradient norms and AdamW from exact integer sums. Definition: kernels/reference/optimizer.py, numbers.py.

Where `sums` are i64 they may also be the f32 mean of an ordered reduction, which no conversion changes.

Rows that fit one program are read once. Longer ones (the second level of a norm: one row, a value for every row of
every weight) take three passes: maxima, then partial sums in int64, both joined by atomics, then the rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import AdamScalars
from kernels.nvidia.numbers import (
    INFINITE,
    bits_of,
    ceil_log2,
    checked_top,
    empty,
    fixed_sum_rows,
    i64_of,
    launch,
    magnitude,
    power_of_two,
    sum_exponent,
    summed,
    zeros,
)
from kernels.nvidia.tiles import WIDEST, row_tile, rows_of_tile

SUM_VALUES, SUM_LANE = 2048, 8  # of a program, of a thread
LONG_BLOCK, LONG_WARPS = 4096, 8
FINISH_BLOCK = 128
ADAM_BLOCK, ADAM_WARPS = 1024, 8
GRADIENT_FLOOR, MOMENT_FLOOR, SQUARE_FLOOR, WEIGHT_FLOOR = (tl.constexpr(bits_of(2.0**-k)) for k in (48, 64, 100, 64))


@triton.jit
def _terms(x, place, inside, mean, SQUARES: tl.constexpr):
    """The values to add: of f32 x themselves, or (f32(x)·mean)² of i64 or f32 x."""
    values = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    if SQUARES:
        values = values * mean
        values = values * values
    return values


@triton.jit
def _sum_rows(
    x,
    out,
    flag,
    mean,
    count,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program sums ROWS whole rows."""
    row, _, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    tl.store(out + row, fixed_sum_rows(_terms(x, place, inside, mean, SQUARES), LOG_TERMS, flag), mask=row < count)


@triton.jit
def _long_terms(x, mean, width, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the row program_id(0)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return _terms(x, tl.program_id(0).to(tl.int64) * width + column, column < width, mean, SQUARES)


@triton.jit
def _long_maxima(x, top, mean, width, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """top[row] = the largest magnitude's bits."""
    values = _long_terms(x, mean, width, SQUARES, BLOCK)
    tl.atomic_max(top + tl.program_id(0), tl.max(magnitude(values), 0), sem="relaxed")


@triton.jit
def _long_totals(x, top, total, mean, width, LOG_TERMS: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """total[row] += the block's part in fixed point; nothing for a row that is zero or not finite."""
    values = _long_terms(x, mean, width, SQUARES, BLOCK)
    size = tl.load(top + tl.program_id(0))
    live = (size > 0) & (size < INFINITE)
    k = sum_exponent(tl.where(live, size, 0), LOG_TERMS)
    part = tl.sum(i64_of(tl.where(live, values, 0.0) * power_of_two(k)), 0)
    tl.atomic_add(total + tl.program_id(0), part, sem="relaxed")


@triton.jit
def _long_finish(top, total, out, flag, count, LOG_TERMS: tl.constexpr, BLOCK: tl.constexpr):
    """Round the totals of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = checked_top(tl.load(top + row, mask=row < count, other=0), flag)
    result = summed(tl.load(total + row, mask=row < count, other=0), sum_exponent(size, LOG_TERMS), size, flag)
    tl.store(out + row, result, mask=row < count)


def _sum(x: Tensor, mean: float, squares: bool, flag: Tensor) -> Tensor:
    count, width = x.shape
    out = empty((count,), torch.float32)
    numbers = {"SQUARES": squares, "LOG_TERMS": ceil_log2(width)}
    if width <= WIDEST:
        tile = row_tile(width, SUM_VALUES, SUM_LANE)
        programs = triton.cdiv(count, tile["ROWS"])
        launch(_sum_rows, (programs,), x, out, flag, mean, count, WIDTH=width, **numbers, **tile)
        return out
    top, total = zeros((count,), torch.int32), zeros((count,), torch.int64)
    grid, block = (count, triton.cdiv(width, LONG_BLOCK)), {"BLOCK": LONG_BLOCK, "num_warps": LONG_WARPS}
    launch(_long_maxima, grid, x, top, mean, width, SQUARES=squares, **block)
    launch(_long_totals, grid, x, top, total, mean, width, **numbers, **block)
    finish = {"LOG_TERMS": ceil_log2(width), "BLOCK": FINISH_BLOCK}
    launch(_long_finish, (triton.cdiv(count, FINISH_BLOCK),), top, total, out, flag, count, **finish)
    return out


def fixed_sum(x: Tensor, flag: Tensor) -> Tensor:
    """The sum of each row of x f32[R, C], as f32[R]: exact in fixed point, rounded once.

    A row that is not finite, or whose sum is beyond float32, raises the flag and sums to 0. Definition:
    kernels/reference/numbers.py.
    """
    return _sum(x, 0.0, False, flag)


def square_rows(sums: Tensor, mean: float) -> Tensor:
    """Σ g² of each row, f32[R], for g = f32(sums)·mean of i64[R, ...]. A vector is one row.

    Definition: kernels/reference/optimizer.py.
    """
    rows = sums.reshape(1 if sums.ndim == 1 else len(sums), -1)
    return _sum(rows, float(mean), True, empty((1,), torch.int32))  # a flag that nobody reads


@triton.jit
def _floor(x, SMALLEST: tl.constexpr):
    """+0 where |x| is below the value of the bits SMALLEST."""
    return tl.where(magnitude(x) < SMALLEST, 0.0, x)


@triton.jit
def _adamw(
    p,
    m,
    v,
    sums,
    count,
    mean,
    clip,
    lr,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    correction1,
    correction2,
    eps,
    BLOCK: tl.constexpr,
):
    """Each program updates BLOCK parameters."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = _floor((tl.load(sums + place, mask=inside, other=0).to(tl.float32) * mean) * clip, GRADIENT_FLOOR)
    first = tl.load(m + place, mask=inside, other=0.0)
    first = _floor(beta1 * first + one_minus_beta1 * g, MOMENT_FLOOR)
    second = tl.load(v + place, mask=inside, other=0.0)
    second = _floor(beta2 * second + one_minus_beta2 * (g * g), SQUARE_FLOOR)
    update = tl.div_rn(first * correction1, tl.sqrt_rn(second * correction2) + eps)
    weight = tl.load(p + place, mask=inside, other=0.0)
    tl.store(p + place, _floor(weight * decay - lr * update, WEIGHT_FLOOR), mask=inside)
    tl.store(m + place, first, mask=inside)
    tl.store(v + place, second, mask=inside)


def adamw(p: Tensor, m: Tensor, v: Tensor, sums: Tensor, s: AdamScalars) -> None:
    """One AdamW update of f32 p, m, v from i64 sums, all of one shape, in place.

    Values below their floors become +0: gradient 2⁻⁴⁸, m and p 2⁻⁶⁴, v 2⁻¹⁰⁰. Definition:
    kernels/reference/optimizer.py.
    """
    count = p.numel()
    scalars = [float(value) for value in s]
    grid = (triton.cdiv(count, ADAM_BLOCK),)
    launch(_adamw, grid, p, m, v, sums, count, *scalars, BLOCK=ADAM_BLOCK, num_warps=ADAM_WARPS)
