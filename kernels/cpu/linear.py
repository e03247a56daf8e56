"""Y = X Wᵀ and its gradients: exact int8 products, each followed by one pass that scales and rounds it in cache.

Work goes by chunks of tokens, which bounds memory. Only integers join across chunks: maxima of columns, on their bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.layers import BLOCK, GRADIENT_UNIT, SUM_LIMIT
from kernels.cpu.numeric import (
    CALLED,
    F1,
    F256,
    I0,
    OPTIONS,
    PARALLEL,
    all_done,
    bf16,
    checked_top,
    code_of,
    f32_of_bf16,
    f32_of_i32,
    fixed_point,
    fixed_point_bad,
    from_bits,
    high_of,
    i8_of_i32,
    inverse_of,
    largest,
    low_of,
    magnitude,
    scale_of,
    store_codes,
)
from kernels.cpu.products import multiply, scratch
from kernels.interface import Part, Rows, Weight

CHUNK = 512  # tokens at least, more where a product is narrow: its int32 result stays in the cache
CHUNK_VALUES = CHUNK * 1024


def chunks(tokens: int, size: int) -> list[slice]:
    """Consecutive spans of at most `size` tokens."""
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def two_products(name: str, hi: np.ndarray, lo: np.ndarray | None, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(hi·right, lo·right) int32 in scratch arrays; for one slice the second is the first."""
    shape = (hi.shape[0], right.shape[1])
    high = multiply(hi, right, scratch(f"{name} high", shape, np.int32))
    return high, high if lo is None else multiply(lo, right, scratch(f"{name} low", shape, np.int32))


@njit(**OPTIONS)
def value_row(high, low, slices, out):
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right), of one row."""
    if slices == 1:
        for j in range(out.size):
            out[j] = f32_of_i32(high[j])
    else:
        for j in range(out.size):
            out[j] = f32_of_i32(high[j]) * F256 + f32_of_i32(low[j])


def transposed(w: Weight) -> np.ndarray:
    """The weight's codes as int8[I, O]."""
    return np.ascontiguousarray(w.hi.T) if w.layout is None else w.layout


@exclusive
def project(x: Rows, w: Weight) -> np.ndarray:
    """X Wᵀ as bf16[T, O]."""
    return _project(x, w, None)


@exclusive
def project_add(x: Rows, w: Weight, residual: np.ndarray) -> np.ndarray:
    """residual + X Wᵀ as bf16[T, O]; the product itself is not rounded to bf16."""
    return _project(x, w, residual)


def _project(x: Rows, w: Weight, residual: np.ndarray | None) -> np.ndarray:
    out = np.empty((len(x.scale), len(w.scale)), np.uint16)
    right = transposed(w)
    slices = 1 if x.lo is None else 2
    for span in chunks(len(out), max(CHUNK, CHUNK_VALUES // out.shape[1])):
        high, low = two_products("project", x.hi[span], None if x.lo is None else x.lo[span], right)
        other = out[span] if residual is None else residual[span]
        _project_rows(high, low, slices, x.scale[span], w.scale, other, residual is not None, out[span])
    return out


@njit(**PARALLEL)
def _project_rows(high, low, slices, row_scale, column_scale, residual, add, out):
    rows, width = out.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            value_row(high[t], low[t], slices, work)
            _scaled_store(work, row_scale[t], column_scale, residual[t], add, out[t])
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _scaled_store(x, row_scale, column_scale, residual, add, out):
    if add:
        for j in range(x.size):
            out[j] = bf16(f32_of_bf16(residual[j]) + (x[j] * row_scale) * column_scale[j])
    else:
        for j in range(x.size):
            out[j] = bf16((x[j] * row_scale) * column_scale[j])


@exclusive
def linear_backward(x: Rows, parts: tuple[Part, ...], slices: int, flag: np.ndarray) -> np.ndarray:
    """Gradients of Y = X Wᵀ for one or more weights that read the same rows.

    dX = bf16((dX₁ + dX₂) + dX₃), each from dY·scale_w quantised by token. Each part's sums gain rint(dW·2²⁴), dW from
    dY·scale_x quantised by channel over the unit's tokens, times the high slice of X.
    """
    out = np.empty(x.hi.shape, np.uint16)
    hi_scale = high_scale(x)
    tops = [np.zeros(len(part.weight.scale), np.int32) for part in parts]
    widest = max(x.hi.shape[1], *(len(top) for top in tops))
    for span in chunks(len(out), max(CHUNK, CHUNK_VALUES // widest)):
        dx = scratch("dx", out[span].shape, np.float32)
        for number, part in enumerate(parts):
            _add_input_gradient(part, span, hi_scale[span], slices, tops[number], number == 0, dx, flag)
        _store(dx, out[span])
    turned = np.ascontiguousarray(x.hi.T)
    for number, part in enumerate(parts):
        _add_weight_gradient(turned, part, hi_scale, slices, tops[number], flag)
    return out


def high_scale(x: Rows) -> np.ndarray:
    """The scale of the high slice alone."""
    return x.scale if x.lo is None else x.scale * F256


def _add_input_gradient(
    part: Part,
    span: slice,
    hi_scale: np.ndarray,
    slices: int,
    top: np.ndarray,
    first: bool,
    dx: np.ndarray,
    flag: np.ndarray,
) -> None:
    """dx f32 = or += one part's dX of a chunk; `top` i32[O] takes in its maxima of the columns of dY·scale_x."""
    dy = part.dy[span]
    hi = scratch("token codes", dy.shape, np.int8)
    lo = scratch("token low codes", dy.shape, np.int8) if slices == 2 else None
    scale = scratch("token scales", (len(dy),), np.float32)
    tops = scratch("chunk tops", ((len(dy) + BLOCK - 1) // BLOCK, dy.shape[1]), np.int32)
    _token_codes(dy, part.weight.scale, hi_scale, slices, hi, hi if lo is None else lo, scale, tops, flag)
    np.maximum(top, tops.max(axis=0), out=top)
    high, low = two_products("dx", hi, lo, part.weight.hi)
    _add_values(high, low, slices, scale, first, dx)


@njit(**PARALLEL)
def _token_codes(dy, weight_scale, hi_scale, slices, hi, lo, scale, tops, flag):
    rows, width = dy.shape
    done = 0
    for block in prange(tops.shape[0]):
        tops[block, :] = I0
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            top = _scale_row(dy[t], weight_scale, hi_scale[t], work, tops[block])
            scale[t] = store_codes(work, checked_top(top, flag), slices, hi[t], lo[t])
        done += 1
    all_done(done, tops.shape[0])


@njit(**OPTIONS)
def _scale_row(dy, weight_scale, hi_scale, out, tops):
    """out = dY·scale_w of a row, whose largest magnitude is returned; tops takes in the magnitudes of dY·scale_x."""
    top = I0
    for j in range(dy.size):
        d = f32_of_bf16(dy[j])
        scaled = d * weight_scale[j]
        out[j] = scaled
        top = largest(top, magnitude(scaled))
        tops[j] = largest(tops[j], magnitude(d * hi_scale))
    return top


@njit(**PARALLEL)
def _add_values(high, low, slices, scale, first, dx):
    rows, width = dx.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            value_row(high[t], low[t], slices, work)
            _accumulate_part(work, scale[t], first, dx[t])
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _accumulate_part(values, scale, first, dx):
    """The named sum (dX₁ + dX₂) + dX₃, one part a call in the parts' order."""
    if first:
        for j in range(values.size):
            dx[j] = values[j] * scale
    else:
        for j in range(values.size):
            dx[j] = dx[j] + values[j] * scale


@njit(**PARALLEL)
def _store(x, out):
    for t in prange(x.shape[0]):
        for j in range(x.shape[1]):
            out[t, j] = bf16(x[t, j])


def _add_weight_gradient(
    turned: np.ndarray, part: Part, hi_scale: np.ndarray, slices: int, top: np.ndarray, flag: np.ndarray
) -> None:
    """sums += rint(dW·2²⁴) from the columns of dY·scale_x with these maxima (as bits), and X's codes int8[I, T].

    The product is dWᵀ: then the large operand, the codes of dY, is wanted as it lies.
    """
    hi = scratch("channel codes", part.dy.shape, np.int8)
    lo = scratch("channel low codes", part.dy.shape, np.int8) if slices == 2 else None
    scale, inverse = column_scales(top, slices, flag)
    _channel_codes(part.dy, hi_scale, inverse, slices, hi, hi if lo is None else lo)
    high = multiply(turned, hi, scratch("dw high", (len(turned), len(top)), np.int32))
    low = high if lo is None else multiply(turned, lo, scratch("dw low", high.shape, np.int32))
    add_gradient(high, low, slices, scale, part.sums, flag)


def column_scales(top: np.ndarray, slices: int, flag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, multiplier to codes) f32 of maxima i32 given as bits."""
    scale, inverse = np.empty(top.size, np.float32), np.empty(top.size, np.float32)
    _column_scales(top, slices, scale, inverse, flag)
    return scale, inverse


@njit(**CALLED)
def _column_scales(tops, slices, scale, inverse, flag):
    for j in range(tops.size):
        top = checked_top(tops[j], flag)
        scale[j], inverse[j] = scale_of(top, slices), inverse_of(top, slices)


@njit(**PARALLEL)
def _channel_codes(dy, hi_scale, inverse, slices, hi, lo):
    for t in prange(dy.shape[0]):
        _channel_row(dy[t], hi_scale[t], inverse, slices, hi[t], lo[t])


@njit(**OPTIONS)
def _channel_row(dy, hi_scale, inverse, slices, hi, lo):
    if slices == 1:
        for j in range(dy.size):
            hi[j] = i8_of_i32(code_of(f32_of_bf16(dy[j]) * hi_scale, inverse[j]))
    else:
        for j in range(dy.size):
            code = code_of(f32_of_bf16(dy[j]) * hi_scale, inverse[j])
            hi[j] = i8_of_i32(high_of(code))
            lo[j] = i8_of_i32(low_of(code))


@njit(**PARALLEL)
def add_gradient(high, low, slices, scale, sums, flag):
    """sums i64[O, I] += rint(value·scale·2²⁴) of dWᵀ int32[I, O]; 2²⁷ or more raises the flag and counts as 0."""
    rows, width = sums.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        first, last = block * BLOCK, min(rows, (block + 1) * BLOCK)
        work = np.empty(width, np.float32)
        high_rows, low_rows = np.empty((BLOCK, width), np.int32), np.empty((BLOCK, width), np.int32)
        _turn(high, first, last, high_rows)
        if slices == 2:
            _turn(low, first, last, low_rows)
        for o in range(first, last):
            value_row(high_rows[o - first], low_rows[o - first], slices, work)
            _add_row(work, scale[o], sums[o], flag)
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _turn(source, first, last, out):
    """Columns first … last of the source become rows of `out`."""
    for i in range(source.shape[0]):
        for j in range(first, last):
            out[j - first, i] = source[i, j]


@njit(**OPTIONS)
def _add_row(values, scale, sums, flag):
    top = I0
    for j in range(values.size):
        x = values[j] * scale
        top = largest(top, magnitude(x))
        sums[j] += fixed_point(x, GRADIENT_UNIT, F1, SUM_LIMIT)
    if fixed_point_bad(from_bits(top), F1, SUM_LIMIT):
        flag[0] = 1
