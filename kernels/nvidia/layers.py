"""Embedding and RMSNorm, forward and backward. Definition: kernels/reference/layers.py.

Every kernel is bound by memory: a row is read once, held by one program, and written once.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import SUM_LIMIT, Rows
from kernels.nvidia.numbers import (
    GRADIENT_UNIT,
    bf16,
    empty,
    f32_of_bf16,
    fixed_point,
    fixed_sum_rows,
    launch,
    raise_flag,
)
from kernels.nvidia.quantise import empty_rows, store_rows
from kernels.nvidia.tiles import mean_over, row_tile, rows_of_tile

EMBED_VALUES, EMBED_LANE = 2048, 8  # of a program, of a thread
SCATTER_VALUES, SCATTER_LANE = 2048, 8
NORM_VALUES, NORM_LANE = 2048, 32
BACKWARD_VALUES, BACKWARD_LANE = 1, 32  # one row at a time
BACKWARD_PROGRAMS = 528  # each goes over many rows and adds to the gain's sums once: 4 a processor of an H200
BACKWARD_STAGES = 3  # rows on their way at a time
GRADIENT_LIMIT = tl.constexpr(2.0**SUM_LIMIT)


@triton.jit
def _embed(table, tokens, out, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program copies ROWS rows of the table."""
    row, column, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    token = tl.load(tokens + row, mask=row < count, other=0)
    values = tl.load(table + token[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(out + place, bf16(values), mask=inside)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the table f32[V, D] as bf16[T, D]. Definition: kernels/reference/layers.py."""
    count, width = len(tokens), table.shape[1]
    out = empty((count, width), torch.int16)
    tile = row_tile(width, EMBED_VALUES, EMBED_LANE)
    launch(_embed, (triton.cdiv(count, tile["ROWS"]),), table, tokens, out, count, WIDTH=width, **tile)
    return out


@triton.jit
def _embed_backward(dx, tokens, sums, flag, count, terms, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds ROWS rows to their tokens' sums: integers, so the order in which they meet is no matter."""
    row, column, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    token = tl.load(tokens + row, mask=row < count, other=0)
    values = f32_of_bf16(tl.load(dx + place, mask=inside, other=0))
    change, bad = fixed_point(values, GRADIENT_UNIT, terms, GRADIENT_LIMIT)
    tl.atomic_add(sums + token[:, None] * WIDTH + column[None, :], change, mask=inside & (change != 0), sem="relaxed")
    raise_flag(flag, bad)


def embed_backward(dx: Tensor, tokens: Tensor, sums: Tensor, flag: Tensor) -> None:
    """sums[token] i64[V, D] += rint(dx · 2²⁴) for dx bf16[T, D]. Definition: kernels/reference/layers.py."""
    count, width = dx.shape
    tile = row_tile(width, SCATTER_VALUES, SCATTER_LANE)
    grid = (triton.cdiv(count, tile["ROWS"]),)
    launch(_embed_backward, grid, dx, tokens, sums, flag, count, float(count), WIDTH=width, **tile)


@triton.jit
def inverse_rms(total, eps, MEAN: tl.constexpr):
    """1 ÷ √(Σx² · mean + eps) of rows, f32."""
    return tl.div_rn(1.0, tl.sqrt_rn(total * MEAN + eps))


@triton.jit
def _norm(
    x,
    gain,
    eps,
    hi,
    lo,
    scale,
    inverse,
    flag,
    count,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    MEAN: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program normalises ROWS rows; they leave as codes in one or two slices, or with none as bf16 in `hi`."""
    row, column, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    values = f32_of_bf16(tl.load(x + place, mask=inside, other=0))
    weight = tl.load(gain + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)
    r = inverse_rms(fixed_sum_rows(values * values, LOG_TERMS, flag), eps, MEAN)
    tl.store(inverse + row, r, mask=row < count)
    y = (values * r[:, None]) * weight
    if SLICES == 0:
        tl.store(hi + place, bf16(y), mask=inside)
    else:
        store_rows(y, hi, lo, scale, flag, row, place, inside, count, SLICES)


def _normalise(x: Tensor, gain: Tensor, eps: np.float32, slices: int, out: Rows, flag: Tensor) -> Tensor:
    count, width = x.shape
    r = empty((count,), torch.float32)
    tile = row_tile(width, NORM_VALUES, NORM_LANE)
    numbers = {"WIDTH": width, "SLICES": slices, **mean_over(width)}
    launch(_norm, (triton.cdiv(count, tile["ROWS"]),), x, gain, float(eps), *out, r, flag, count, **numbers, **tile)
    return r


def norm_rows(x: Tensor, gain: Tensor, eps: np.float32, slices: int, flag: Tensor) -> tuple[Rows, Tensor]:
    """RMSNorm of x bf16[T, D] with a gain f32[D]: Rows[T, D], and the inverse root mean squares f32[T].

    Definition: kernels/reference/layers.py.
    """
    rows = empty_rows(x.shape[0], x.shape[1], slices)
    return rows, _normalise(x, gain, eps, slices, rows, flag)


def norm_bf16(x: Tensor, gain: Tensor, eps: np.float32, flag: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm of x bf16[T, D] with a gain f32[D], kept as bf16[T, D]; and the inverse root mean squares f32[T].

    Definition: kernels/reference/layers.py.
    """
    out = torch.empty_like(x)
    return out, _normalise(x, gain, eps, 0, Rows(out, None, None), flag)


@triton.jit
def through_norm(g, n, mean, r):
    """The gradient of a norm's input from that of its output, (g − n·mean)·r, for rows of n, g; mean and r by row."""
    return (g - n * mean[:, None]) * r[:, None]


@triton.jit
def _norm_backward(
    dy,
    x,
    inverse,
    gain,
    residual,
    out,
    sums,
    flag,
    count,
    terms,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    MEAN: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes TURNS tiles of rows; the gain stays in registers, and its sums too."""
    column = tl.arange(0, BLOCK)[None, :]
    known = column < WIDTH
    weight = tl.load(gain + column, mask=known, other=0.0)
    part = tl.zeros([ROWS, BLOCK], tl.int64)
    void = tl.zeros([ROWS, BLOCK], tl.int32)
    for turn in tl.range(TURNS, num_stages=STAGES):
        row = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * WIDTH + column
        inside = (row < count)[:, None] & known
        d = f32_of_bf16(tl.load(dy + place, mask=inside, other=0))
        r = tl.load(inverse + row, mask=row < count, other=0.0)
        n = f32_of_bf16(tl.load(x + place, mask=inside, other=0)) * r[:, None]
        g = d * weight
        change, bad = fixed_point(d * n, GRADIENT_UNIT, terms, GRADIENT_LIMIT)
        part += change
        void |= bad.to(tl.int32)
        dx = through_norm(g, n, fixed_sum_rows(n * g, LOG_TERMS, flag) * MEAN, r)
        if ADD:
            dx = f32_of_bf16(tl.load(residual + place, mask=inside, other=0)) + dx
        tl.store(out + place, bf16(dx), mask=inside)
    tl.atomic_add(sums + tl.arange(0, BLOCK), tl.sum(part, 0), mask=tl.arange(0, BLOCK) < WIDTH, sem="relaxed")
    raise_flag(flag, void > 0)


def norm_backward(
    dy: Tensor, x: Tensor, r: Tensor, gain: Tensor, residual: Tensor | None, sums: Tensor, flag: Tensor
) -> Tensor:
    """residual + dX of Y = x·r·gain, as bf16[T, D]; sums i64[D] gain rint(dY·x·r·2²⁴).

    Definition: kernels/reference/layers.py.
    """
    count, width = dy.shape
    out = torch.empty_like(dy)
    tile = row_tile(width, BACKWARD_VALUES, BACKWARD_LANE)
    turns = max(1, triton.cdiv(count, tile["ROWS"] * BACKWARD_PROGRAMS))
    programs = triton.cdiv(count, tile["ROWS"] * turns)
    numbers = {"WIDTH": width, "ADD": residual is not None, **mean_over(width)}
    tensors = (dy, x, r, gain, residual, out, sums, flag)
    loop = {"TURNS": turns, "STAGES": BACKWARD_STAGES}
    launch(_norm_backward, (programs,), *tensors, count, float(count), **loop, **numbers, **tile)
    return out
