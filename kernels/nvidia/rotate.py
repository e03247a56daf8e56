"""QK-norm and rotation of query and key heads, forward and backward. Definition: kernels/reference/layers.py.

A row is one head of one token, and its pairs (even, odd) are rotated. A pair is loaded and stored as one word (two bf16
in 32 bits, two f32 in 64, two codes in 16), so that both of its values are in one thread.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Rope, Rows
from kernels.nvidia.elementary import LOG2_E
from kernels.nvidia.layers import inverse_rms, through_norm
from kernels.nvidia.numbers import (
    bf16,
    checked_top,
    code_of,
    from_bits,
    i64_of,
    inverse_of,
    inverse_root,
    launch,
    magnitude,
    power_of_two,
    scale_of,
    sum_exponent,
    summed,
)
from kernels.nvidia.quantise import empty_rows
from kernels.nvidia.tiles import mean_over, row_tile, rows_of_tile

PAIRS, LANE = 2048, 16  # pairs of a program, of a thread
BACK_PAIRS, BACK_LANE = 1024, 8
ODD = tl.constexpr(-65536)  # the upper half of a word


@triton.jit
def _sum_pairs(a, b, LOG_TERMS: tl.constexpr, flag):
    """The fixed sums of rows whose values are those of both tiles, f32[R]."""
    top = checked_top(tl.max(tl.maximum(magnitude(a), magnitude(b)), 1), flag)
    k = sum_exponent(top, LOG_TERMS)
    live, unit = (top > 0)[:, None], power_of_two(k)[:, None]
    total = tl.sum(i64_of(tl.where(live, a, 0.0) * unit) + i64_of(tl.where(live, b, 0.0) * unit), 1)
    return summed(total, k, top, flag)


@triton.jit
def _angles(cos, sin, row, column, inside, heads, sequence, PAIRS: tl.constexpr):
    """Cosines and sines of the rows' positions."""
    place = ((row // heads) % sequence)[:, None] * PAIRS + column[None, :]
    return tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)


@triton.jit
def _rotate_rows(
    y,
    cos,
    sin,
    eps,
    hi,
    scale,
    flag,
    count,
    heads,
    sequence,
    WIDTH: tl.constexpr,
    MEAN: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes ROWS rows of WIDTH pairs."""
    row, column, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    word = tl.load(y + place, mask=inside, other=0)
    even, odd = from_bits(word << 16), from_bits(word & ODD)
    r = inverse_rms(_sum_pairs(even * even, odd * odd, LOG_TERMS, flag), eps, MEAN)[:, None]
    even, odd = even * r, odd * r
    c, s = _angles(cos, sin, row, column, inside, heads, sequence, WIDTH)
    left, right = even * c - odd * s, even * s + odd * c
    top = checked_top(tl.max(tl.maximum(magnitude(left), magnitude(right)), 1), flag)
    tl.store(scale + row, scale_of(top, 1) * FACTOR, mask=row < count)
    inverse = inverse_of(top, 1)[:, None]
    code = (code_of(right, inverse) << 8) | (code_of(left, inverse) & 0xFF)
    tl.store(hi + place, code.to(tl.int16), mask=inside)


def rotate_rows(y: Tensor, rope: Rope, eps: np.float32, query: bool, flag: Tensor) -> Rows:
    """Rows[T·H, E] of y bf16[T, H·E]: gain-free QK-norm per head, rotation, one slice; log₂e/√E in a query's scale.

    Definition: kernels/reference/layers.py.
    """
    sequence, pairs = rope.cos.shape
    count = y.numel() // (2 * pairs)
    rows = empty_rows(count, 2 * pairs, 1)
    tile = row_tile(pairs, PAIRS, LANE)
    numbers = {"FACTOR": _query_factor(2 * pairs) if query else 1.0, "WIDTH": pairs, **mean_over(2 * pairs)}
    words = (y.view(torch.int32), rope.cos, rope.sin, float(eps), rows.hi.view(torch.int16), rows.scale, flag)
    launch(_rotate_rows, (triton.cdiv(count, tile["ROWS"]),), *words, *_heads(y, count), sequence, **numbers, **tile)
    return rows


@triton.jit
def _rotate_backward(
    dz,
    y,
    cos,
    sin,
    eps,
    out,
    flag,
    count,
    heads,
    sequence,
    WIDTH: tl.constexpr,
    MEAN: tl.constexpr,
    LOG_TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes ROWS rows of WIDTH pairs."""
    row, column, place, inside = rows_of_tile(count, WIDTH, ROWS, BLOCK)
    word = tl.load(y + place, mask=inside, other=0)
    even, odd = from_bits(word << 16), from_bits(word & ODD)
    r = inverse_rms(_sum_pairs(even * even, odd * odd, LOG_TERMS, flag), eps, MEAN)
    even, odd = even * r[:, None], odd * r[:, None]
    pair = tl.load(dz + place, mask=inside, other=0)
    left, right = from_bits(pair.to(tl.int32)), from_bits((pair >> 32).to(tl.int32))
    c, s = _angles(cos, sin, row, column, inside, heads, sequence, WIDTH)
    left, right = left * c + right * s, right * c - left * s
    mean = _sum_pairs(even * left, odd * right, LOG_TERMS, flag) * MEAN
    left = bf16(through_norm(left, even, mean, r)).to(tl.int32)
    right = bf16(through_norm(right, odd, mean, r)).to(tl.int32)
    tl.store(out + place, (right << 16) | (left & 0xFFFF), mask=inside)


def rotate_backward(dz: Tensor, y: Tensor, rope: Rope, eps: np.float32, flag: Tensor) -> Tensor:
    """The gradient of rotate_rows' input, bf16[T, H·E], from dz f32[T·H, E] and y bf16[T, H·E].

    Definition: kernels/reference/layers.py.
    """
    sequence, pairs = rope.cos.shape
    count = dz.shape[0]
    out = torch.empty_like(y)
    tile = row_tile(pairs, BACK_PAIRS, BACK_LANE)
    words = (dz.view(torch.int64), y.view(torch.int32), rope.cos, rope.sin, float(eps), out.view(torch.int32), flag)
    grid = (triton.cdiv(count, tile["ROWS"]),)
    launch(_rotate_backward, grid, *words, *_heads(y, count), sequence, WIDTH=pairs, **mean_over(2 * pairs), **tile)
    return out


def _heads(y: Tensor, count: int) -> tuple[int, int]:
    """(rows, rows of each token)."""
    return count, count // max(1, len(y))


def _query_factor(width: int) -> float:
    """log₂e · (1 ÷ √E), each rounded to float32 on the host."""
    return float(np.float32(LOG2_E.value) * np.float32(inverse_root(width)))
