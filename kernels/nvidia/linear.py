"""Y = X Wᵀ and its gradients: int8 products whose tiles end in their scales, one launch for each product.

Forward and dX store bf16 straight from the accumulators; dW adds into the int64 sums, which tiles own exclusively. The
parts of one backward (q, k and v, say) share a launch of each product, so that narrow ones fill the device too.
Definition: kernels/reference/products.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import GRADIENT_BITS, SUM_LIMIT, Part, Rows, Weight
from kernels.nvidia.numbers import bf16, bits_of, empty, f32_of_bf16, i64_of, launch, magnitude
from kernels.nvidia.products import check_terms, tile_of, value
from kernels.nvidia.transpose import gradient_codes, transposed

# Tiles by the number of accumulators that a thread holds at once. Sizes that fill fewer programs than PROGRAMS take
# the small tile.
LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
SMALL = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
SUMS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "CHUNK": 32, "num_warps": 8, "num_stages": 3}
PROGRAMS = 128

UNIT = tl.constexpr(2.0**GRADIENT_BITS)
LIMIT = tl.constexpr(bits_of(2.0**SUM_LIMIT))


@triton.jit
def _rows_and_columns(M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column indices of this program's tile, of which some may lie beyond the matrix, and its first column."""
    row_tile, column_tile = tile_of(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    first = column_tile * BLOCK_N
    return row_tile * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), first


@triton.jit
def _project(
    x_hi, x_lo, x_scale, w_hi, w_scale, residual, out, T, width, TERMS: tl.constexpr, SLICES: tl.constexpr,
    ADD: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of bf16(X Wᵀ), or of bf16(residual + X Wᵀ)."""
    rows, columns, _ = _rows_and_columns(T, width, GROUP, BLOCK_M, BLOCK_N)
    t, o = tl.minimum(rows, T - 1), tl.minimum(columns, width - 1)
    row, right = t.to(tl.int64) * TERMS, w_hi + o.to(tl.int64) * TERMS
    y = value(x_hi + row, x_lo + row, right, TERMS, SLICES, BLOCK_K)
    y = (y * tl.load(x_scale + t)[:, None]) * tl.load(w_scale + o)[None, :]
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < T)[:, None] & (columns < width)[None, :]
    if ADD:
        y = f32_of_bf16(tl.load(residual + at, mask=inside, other=0)) + y
    tl.store(out + at, bf16(y), mask=inside)


@triton.jit
def _input_gradient(
    hi, lo, scale, w1, w2, w3, out, T, width, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of bf16((dX₁ + dX₂) + dX₃), from token codes int8[T, ΣO] and the weights' transposes int8[I, O]."""
    rows, columns, _ = _rows_and_columns(T, width, GROUP, BLOCK_M, BLOCK_N)
    t, i = tl.minimum(rows, T - 1), tl.minimum(columns, width - 1).to(tl.int64)
    hi += t.to(tl.int64) * (O1 + O2 + O3)
    lo += t.to(tl.int64) * (O1 + O2 + O3)
    dx = value(hi, lo, w1 + i * O1, O1, SLICES, BLOCK_K) * tl.load(scale + t)[:, None]
    if PARTS > 1:
        part = value(hi + O1, lo + O1, w2 + i * O2, O2, SLICES, BLOCK_K)
        dx = dx + part * tl.load(scale + T + t)[:, None]
    if PARTS > 2:
        part = value(hi + (O1 + O2), lo + (O1 + O2), w3 + i * O3, O3, SLICES, BLOCK_K)
        dx = dx + part * tl.load(scale + 2 * T + t)[:, None]
    inside = (rows < T)[:, None] & (columns < width)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * width + columns[None, :], bf16(dx), mask=inside)


@triton.jit
def _add(dw, row_at, in_rows, first, width, flag, CHUNK: tl.constexpr):
    """sums i64 += rint(dW·2²⁴) of a tile whose rows begin at pointers and whose columns at `first`; 2²⁷ or more, or
    what is not finite, raises the flag and counts as 0. CHUNK columns at a time: 64 bits a value fill registers."""
    ROWS: tl.constexpr = dw.shape[0]
    COLUMNS: tl.constexpr = dw.shape[1]
    if COLUMNS > CHUNK:
        left, right = tl.split(tl.permute(tl.reshape(dw, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _add(left, row_at, in_rows, first, width, flag, CHUNK)
        _add(right, row_at, in_rows, first + COLUMNS // 2, width, flag, CHUNK)
    else:
        size = magnitude(dw)
        if tl.max(tl.max(size, 1), 0) >= LIMIT:
            tl.atomic_or(flag, 1, sem="relaxed")
        amount = i64_of(tl.where(size < LIMIT, dw, 0.0) * UNIT)
        columns = first + tl.arange(0, COLUMNS)
        at = row_at[:, None] + columns[None, :]
        inside = in_rows[:, None] & (columns < width)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0) + amount, mask=inside)


@triton.jit
def _add_gradient(
    hi, lo, scale, x, s1, s2, s3, flag, width, O1, O2, TOTAL, T: tl.constexpr, SLICES: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile of dW into the parts' sums i64[O, I], from channel codes int8[ΣO, T] and X transposed int8[I, T]."""
    rows, columns, first = _rows_and_columns(TOTAL, width, GROUP, BLOCK_M, BLOCK_N)
    o, i = tl.minimum(rows, TOTAL - 1), tl.minimum(columns, width - 1)
    row, right = o.to(tl.int64) * T, x + i.to(tl.int64) * T
    dw = value(hi + row, lo + row, right, T, SLICES, BLOCK_K) * tl.load(scale + o)[:, None]
    at = s1 + rows.to(tl.int64) * width
    if PARTS > 1:
        at = tl.where(rows < O1, at, s2 + (rows - O1).to(tl.int64) * width)
    if PARTS > 2:
        at = tl.where(rows < O1 + O2, at, s3 + (rows - O1 - O2).to(tl.int64) * width)
    _add(dw, at, rows < TOTAL, first, width, flag, CHUNK)


def _run(kernel: Any, rows: int, columns: int, terms: tuple[int, ...], tile: dict[str, int], *a: Any, **c: Any) -> None:
    """Launch a product's kernel over the tiles of a [rows, columns] matrix."""
    check_terms(*terms)
    launch(kernel, (_programs(rows, columns, tile),), *a, **c, **tile)


def _programs(rows: int, columns: int, tile: dict[str, int]) -> int:
    return triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"])


def _tile(rows: int, columns: int, accumulators: int) -> dict[str, int]:
    """The large tile where a thread has room for it and the device is filled."""
    return LARGE if accumulators == 1 and _programs(rows, columns, LARGE) >= PROGRAMS else SMALL


def project(x: Rows, w: Weight) -> Tensor:
    """X Wᵀ as bf16[T, O]. Definition: kernels/reference/products.py."""
    return _projected(x, w, None)


def project_add(x: Rows, w: Weight, residual: Tensor) -> Tensor:
    """residual + X Wᵀ as bf16[T, O]; the product itself is not rounded to bf16."""
    return _projected(x, w, residual)


def _projected(x: Rows, w: Weight, residual: Tensor | None) -> Tensor:
    (tokens, terms), width = x.hi.shape, w.hi.shape[0]
    out, slices = empty((tokens, width), torch.int16), 1 if x.lo is None else 2
    _run(
        *(_project, tokens, width, (terms,), _tile(tokens, width, slices)),
        *(x.hi, x.hi if x.lo is None else x.lo, x.scale, w.hi, w.scale, out if residual is None else residual, out),
        *(tokens, width, terms),
        SLICES=slices,
        ADD=residual is not None,
    )
    return out


def linear_backward(x: Rows, parts: tuple[Part, ...], slices: int, flag: Tensor) -> Tensor:
    """dX bf16[T, I] = (dX₁ + dX₂) + dX₃ of one to three weights that read the same rows; each part's sums gain
    rint(dW·2²⁴). Definition: kernels/reference/products.py."""
    (tokens, inputs), count = x.hi.shape, len(parts)
    widths = tuple(part.dy.shape[1] for part in parts)
    codes, out = gradient_codes(x, parts, slices, flag), empty((tokens, inputs), torch.int16)
    filled = [parts[min(index, count - 1)] for index in range(3)]
    _run(
        *(_input_gradient, tokens, inputs, widths, _tile(tokens, inputs, slices + (count > 1))),
        *(codes.token_hi, codes.token_lo, codes.token_scale, *(part.weight.layout for part in filled), out),
        *(tokens, inputs, *widths, *[0] * (3 - count)),
        SLICES=slices,
        PARTS=count,
    )
    _run(
        *(_add_gradient, sum(widths), inputs, (tokens,), SUMS),
        *(codes.channel_hi, codes.channel_lo, codes.channel_scale, transposed(x.hi)),
        *(*(part.sums for part in filled), flag, inputs, *(*widths, 0)[:2], sum(widths), tokens),
        SLICES=slices,
        PARTS=count,
    )
    return out
