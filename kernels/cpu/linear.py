"""Y = X Wᵀ and its gradients: exact int8 products, each followed by one pass that scales and rounds it in cache.

A thread takes a chunk of tokens, or for the weight's gradient a block of channels over all of them, which also bounds
memory. Only integers join across chunks: maxima of columns, on their bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.exclusive import exclusive
from kernels.cpu.layers import GRADIENT_UNIT, SUM_LIMIT
from kernels.cpu.numeric import (
    CALLED,
    F1,
    F256,
    I0,
    OPTIONS,
    SERIAL,
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
from kernels.cpu.pool import spread
from kernels.cpu.products import multiply, scratch
from kernels.interface import GradientSlices, Part, Rows, Weight

CHUNK = 256  # tokens of a chunk
CHANNELS = 128  # rows of a weight in a block


def chunks(count: int, size: int) -> list[slice]:
    """Consecutive spans of at most `size`, which cover 0 … count − 1."""
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def two_products(name: str, hi: np.ndarray, lo: np.ndarray | None, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(hi·right, lo·right) int32 in scratch arrays; for one slice the second is the first."""
    rows, width = hi.shape[0], right.shape[1]
    if lo is None:
        high = multiply(hi, right, scratch(f"{name} product", (rows, width), np.int32))
        return high, high
    both = multiply(np.concatenate((hi, lo)), right, scratch(f"{name} product", (2 * rows, width), np.int32))
    return both[:rows], both[rows:]


@njit(**OPTIONS)
def value_row(high, low, slices, out):
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right), of one row."""
    if slices == 1:
        for j in range(out.size):
            out[j] = f32_of_i32(high[j])
    else:
        for j in range(out.size):
            out[j] = f32_of_i32(high[j]) * F256 + f32_of_i32(low[j])


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
    spread(_project_chunk, [(x, w, residual, span, out[span]) for span in chunks(len(out), CHUNK)])
    return out


def _project_chunk(x: Rows, w: Weight, residual: np.ndarray | None, span: slice, out: np.ndarray) -> None:
    slices = 1 if x.lo is None else 2
    high, low = two_products("project", x.hi[span], None if x.lo is None else x.lo[span], w.hi.T)
    other = out if residual is None else residual[span]
    _project_rows(high, low, slices, x.scale[span], w.scale, other, residual is not None, out)


@njit(**SERIAL)
def _project_rows(high, low, slices, row_scale, column_scale, residual, add, out):
    rows, width = out.shape
    work = np.empty(width, np.float32)
    for t in range(rows):
        value_row(high[t], low[t], slices, work)
        _scaled_store(work, row_scale[t], column_scale, residual[t], add, out[t])


@njit(**OPTIONS)
def _scaled_store(x, row_scale, column_scale, residual, add, out):
    if add:
        for j in range(x.size):
            out[j] = bf16(f32_of_bf16(residual[j]) + (x[j] * row_scale) * column_scale[j])
    else:
        for j in range(x.size):
            out[j] = bf16((x[j] * row_scale) * column_scale[j])


@exclusive
def linear_backward(x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: np.ndarray) -> np.ndarray:
    """Gradients of Y = X Wᵀ for one or more weights that read the same rows.

    dX = bf16((dX₁ + dX₂) + dX₃), each from dY·scale_w quantised by token. Each part's sums gain rint(dW·2²⁴), dW from
    dY·scale_x quantised by channel over the unit's tokens, times the high slice of X.
    """
    out, hi_scale = np.empty(x.hi.shape, np.uint16), high_scale(x)
    spans = chunks(len(out), CHUNK)
    tops = [np.zeros((len(spans), len(part.weight.scale)), np.int32) for part in parts]
    work = []
    for i, span in enumerate(spans):
        work.append((parts, span, hi_scale[span], slices.input, [top[i] for top in tops], out[span], flag))
    spread(_input_gradient, work)
    blocks = []
    for part, top in zip(parts, tops, strict=True):
        scale, inverse = column_scales(top.max(axis=0), slices.weight, flag)
        for block in chunks(len(scale), CHANNELS):
            blocks.append((x.hi, part, block, hi_scale, slices.weight, scale[block], inverse[block], flag))
    spread(_add_weight_gradient, blocks)
    return out


def high_scale(x: Rows) -> np.ndarray:
    """The scale of the high slice alone."""
    return x.scale if x.lo is None else x.scale * F256


def _input_gradient(
    parts: tuple[Part, ...],
    span: slice,
    hi_scale: np.ndarray,
    slices: int,
    tops: list[np.ndarray],
    out: np.ndarray,
    flag: np.ndarray,
) -> None:
    """dX bf16 of a chunk; each part's `tops` i32[O] take in its maxima of the columns of dY·scale_x, as bits."""
    dx = scratch("dx", out.shape, np.float32)
    for number, (part, top) in enumerate(zip(parts, tops, strict=True)):
        dy = part.dy[span]
        hi = scratch("token codes", dy.shape, np.int8)
        lo = scratch("token low codes", dy.shape, np.int8) if slices == 2 else None
        scale = scratch("token scales", (len(dy),), np.float32)
        _token_codes(dy, part.weight.scale, hi_scale, slices, hi, hi if lo is None else lo, scale, top, flag)
        high, low = two_products("dx", hi, lo, part.weight.hi)
        _add_values(high, low, slices, scale, number == 0, dx)
    _store(dx, out)


@njit(**SERIAL)
def _token_codes(dy, weight_scale, hi_scale, slices, hi, lo, scale, tops, flag):
    rows, width = dy.shape
    work = np.empty(width, np.float32)
    for t in range(rows):
        top = _scale_row(dy[t], weight_scale, hi_scale[t], work, tops)
        scale[t] = store_codes(work, checked_top(top, flag), slices, hi[t], lo[t])


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


@njit(**SERIAL)
def _add_values(high, low, slices, scale, first, dx):
    rows, width = dx.shape
    work = np.empty(width, np.float32)
    for t in range(rows):
        value_row(high[t], low[t], slices, work)
        _accumulate_part(work, scale[t], first, dx[t])


@njit(**OPTIONS)
def _accumulate_part(values, scale, first, dx):
    """The named sum (dX₁ + dX₂) + dX₃, one part a call in the parts' order."""
    if first:
        for j in range(values.size):
            dx[j] = values[j] * scale
    else:
        for j in range(values.size):
            dx[j] = dx[j] + values[j] * scale


@njit(**SERIAL)
def _store(x, out):
    for t in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[t, j] = bf16(x[t, j])


def _add_weight_gradient(
    x: np.ndarray,
    part: Part,
    block: slice,
    hi_scale: np.ndarray,
    slices: int,
    scale: np.ndarray,
    inverse: np.ndarray,
    flag: np.ndarray,
) -> None:
    """A block of the rows of sums += rint(dW·2²⁴), from dY·scale_x quantised by these channels, and X's int8[T, I]."""
    shape = (len(x), len(scale))
    hi = scratch("channel codes", shape, np.int8)
    lo = scratch("channel low codes", shape, np.int8) if slices == 2 else hi
    _channel_codes(part.dy, block.start, hi_scale, inverse, slices, hi, lo)
    high = multiply(hi.T, x, scratch("dw high", (len(scale), x.shape[1]), np.int32))
    low = high if slices == 1 else multiply(lo.T, x, scratch("dw low", high.shape, np.int32))
    add_gradient(high, low, slices, scale, SUM_LIMIT, part.sums[block], flag)


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


@njit(**SERIAL)
def _channel_codes(dy, first, hi_scale, inverse, slices, hi, lo):
    for t in range(dy.shape[0]):
        _channel_row(dy[t, first : first + inverse.size], hi_scale[t], inverse, slices, hi[t], lo[t])


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


@njit(**SERIAL)
def add_gradient(high, low, slices, scale, limit, sums, flag):
    """sums i64[O, I] += rint(value·scale·2²⁴) of dW int32[O, I]; `limit` or more raises the flag and counts as 0."""
    rows, width = sums.shape
    work = np.empty(width, np.float32)
    for o in range(rows):
        value_row(high[o], low[o], slices, work)
        _add_row(work, scale[o], limit, sums[o], flag)


@njit(**OPTIONS)
def _add_row(values, scale, limit, sums, flag):
    top = I0
    for j in range(values.size):
        x = values[j] * scale
        top = largest(top, magnitude(x))
        sums[j] += fixed_point(x, GRADIENT_UNIT, F1, limit)
    if fixed_point_bad(from_bits(top), F1, limit):
        flag[0] = 1
