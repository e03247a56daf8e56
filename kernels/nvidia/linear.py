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

from kernels.interface import SUM_LIMIT, GradientSlices, Part, Rows, Weight
from kernels.nvidia.numbers import GRADIENT_UNIT, bf16, bits_of, empty, f32_of_bf16, i64_of, launch, magnitude
from kernels.nvidia.products import check_terms, low_slice, slice_count, tile_of, value
from kernels.nvidia.transpose import gradient_codes, transposed

# With one accumulator two programs share a processor: one multiplies while the other waits for its sums.
TILE = {"M": 128, "N": 128, "K": 128, "GROUP": 8, "num_warps": 4, "num_stages": 3}
PARTS = {**TILE, "num_warps": 8}  # dX of several parts holds their sum beside the accumulator
SUMS = {**TILE, "CHUNK": 32, "num_warps": 8}  # so many columns' sums at a time: 64 bits a value fill registers

LIMIT = tl.constexpr(bits_of(2.0**SUM_LIMIT))


@triton.jit
def _project(
    x_hi, x_lo, x_scale, w_hi, w_scale, residual, out, T, width, TERMS: tl.constexpr, SLICES: tl.constexpr,
    ADD: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of bf16(X Wᵀ), or of bf16(residual + X Wᵀ)."""
    first, other = tile_of(T, width, GROUP, M, N)
    t, o = first + tl.arange(0, M), other + tl.arange(0, N)
    y = value(x_hi, x_lo, w_hi, first, other, T, width, TERMS, TERMS, SLICES, M, N, K)
    y = y * tl.load(x_scale + t, mask=t < T, other=0.0)[:, None]
    y = y * tl.load(w_scale + o, mask=o < width, other=0.0)[None, :]
    at = t.to(tl.int64)[:, None] * width + o[None, :]
    inside = (t < T)[:, None] & (o < width)[None, :]
    if ADD:
        y = f32_of_bf16(tl.load(residual + at, mask=inside, other=0)) + y
    tl.store(out + at, bf16(y), mask=inside)


@triton.jit
def _input_gradient(
    hi, lo, scale, w1, w2, w3, out, T, width, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of bf16((dX₁ + dX₂) + dX₃), from token codes int8[T, ΣO] and the weights' transposes int8[I, O]."""
    first, other = tile_of(T, width, GROUP, M, N)
    t, i = first + tl.arange(0, M), other + tl.arange(0, N)
    TOTAL: tl.constexpr = O1 + O2 + O3
    dx = value(hi, lo, w1, first, other, T, width, TOTAL, O1, SLICES, M, N, K)
    dx = dx * tl.load(scale + t, mask=t < T, other=0.0)[:, None]
    if PARTS > 1:
        part = value(hi + O1, lo + O1, w2, first, other, T, width, TOTAL, O2, SLICES, M, N, K)
        dx = dx + part * tl.load(scale + T + t, mask=t < T, other=0.0)[:, None]
    if PARTS > 2:
        part = value(hi + (O1 + O2), lo + (O1 + O2), w3, first, other, T, width, TOTAL, O3, SLICES, M, N, K)
        dx = dx + part * tl.load(scale + 2 * T + t, mask=t < T, other=0.0)[:, None]
    inside = (t < T)[:, None] & (i < width)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * width + i[None, :], bf16(dx), mask=inside)


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
        amount = i64_of(tl.where(size < LIMIT, dw, 0.0) * GRADIENT_UNIT)
        columns = first + tl.arange(0, COLUMNS)
        at = row_at[:, None] + columns[None, :]
        inside = in_rows[:, None] & (columns < width)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0) + amount, mask=inside)


@triton.jit
def _add_gradient(
    hi, lo, scale, x, s1, s2, s3, flag, width, O1, O2, TOTAL, T: tl.constexpr, SLICES: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile of dW into the parts' sums i64[O, I], from channel codes int8[ΣO, T] and X transposed int8[I, T]."""
    first, other = tile_of(TOTAL, width, GROUP, M, N)
    o = first + tl.arange(0, M)
    dw = value(hi, lo, x, first, other, TOTAL, width, T, T, SLICES, M, N, K)
    dw = dw * tl.load(scale + o, mask=o < TOTAL, other=0.0)[:, None]
    at = s1 + o.to(tl.int64) * width
    if PARTS > 1:
        at = tl.where(o < O1, at, s2 + (o - O1).to(tl.int64) * width)
    if PARTS > 2:
        at = tl.where(o < O1 + O2, at, s3 + (o - O1 - O2).to(tl.int64) * width)
    _add(dw, at, o < TOTAL, other, width, flag, CHUNK)


def _run(
    kernel: Any, rows: int, columns: int, terms: tuple[int, ...], tile: dict[str, int], slices: int, *a: Any, **c: Any
) -> None:
    """Launch a product's kernel over the tiles of a [rows, columns] matrix; the slices share a tile's rows."""
    check_terms(*terms)
    tile = {**tile, "M": tile["M"] // slices}
    programs = triton.cdiv(rows, tile["M"]) * triton.cdiv(columns, tile["N"])
    launch(kernel, (programs,), *a, **c, **tile, SLICES=slices)


def project(x: Rows, w: Weight) -> Tensor:
    """X Wᵀ as bf16[T, O]. Definition: kernels/reference/products.py."""
    return _projected(x, w, None)


def project_add(x: Rows, w: Weight, residual: Tensor) -> Tensor:
    """residual + X Wᵀ as bf16[T, O]; the product itself is not rounded to bf16."""
    return _projected(x, w, residual)


def _projected(x: Rows, w: Weight, residual: Tensor | None) -> Tensor:
    (tokens, terms), width = x.hi.shape, w.hi.shape[0]
    out = empty((tokens, width), torch.int16)
    _run(
        *(_project, tokens, width, (terms,), TILE, slice_count(x)),
        *(x.hi, low_slice(x), x.scale, w.hi, w.scale, out if residual is None else residual, out),
        *(tokens, width, terms),
        ADD=residual is not None,
    )
    return out


def linear_backward(x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: Tensor) -> Tensor:
    """dX bf16[T, I] = (dX₁ + dX₂) + dX₃ of one to three weights that read the same rows; each part's sums gain
    rint(dW·2²⁴). Definition: kernels/reference/products.py."""
    (tokens, inputs), count = x.hi.shape, len(parts)
    widths = tuple(part.dy.shape[1] for part in parts)
    codes, out = gradient_codes(x, parts, slices, flag), empty((tokens, inputs), torch.int16)
    filled = [parts[min(index, count - 1)] for index in range(3)]
    _run(
        *(_input_gradient, tokens, inputs, widths, TILE if count == 1 else PARTS, slices.input),
        *(codes.token_hi, codes.token_lo, codes.token_scale, *(part.weight.layout for part in filled), out),
        *(tokens, inputs, *widths, *[0] * (3 - count)),
        PARTS=count,
    )
    _run(
        *(_add_gradient, sum(widths), inputs, (tokens,), SUMS, slices.weight),
        *(codes.channel_hi, codes.channel_lo, codes.channel_scale, transposed(x.hi)),
        *(*(part.sums for part in filled), flag, inputs, *(*widths, 0)[:2], sum(widths), tokens),
        PARTS=count,
    )
    return out
