"""The output head: logits, cross-entropy with z-loss, and their gradients, in chunks of tokens.

A large vocabulary's logits exist one chunk at a time and are made again for the second sweep: recomputed floats are the
same bits. What joins across chunks is integer: losses, column maxima on bits, and the int32 products of the weight
gradient, whose terms may be added in any grouping.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.layers import BLOCK, GRADIENT_UNIT, SUM_LIMIT
from kernels.cpu.linear import (
    add_gradient,
    chunks,
    column_scales,
    high_scale,
    transposed,
    two_products,
    value_row,
)
from kernels.cpu.numeric import (
    F0,
    F1,
    F256,
    I0,
    LN_2,
    LOG2_E,
    OPTIONS,
    PARALLEL,
    all_done,
    bf16,
    checked_top,
    code_of,
    exp2,
    f32_of_i8,
    f32_of_i32,
    f32_of_i64,
    fixed_point,
    fixed_point_bad,
    from_bits,
    high_of,
    i8_of_i32,
    i64_of_f32,
    key_bits,
    largest,
    log2,
    low_of,
    magnitude,
    order_key,
    rint,
    store_codes,
)
from kernels.cpu.products import multiply, scratch
from kernels.interface import LSE2_BITS, Rows, Weight

CHUNK_LOGITS, CHUNK_TOKENS = 1 << 21, 64  # logits of a chunk, and its tokens at least
HELD_LOGITS = 1 << 25  # logits of a unit that are kept from sweep to sweep, 128 MiB
MASS_BITS = np.float32(40)
MASS_UNIT = np.float32(2.0**40)
LSE2_UNIT, LSE2_LIMIT = np.float32(2.0**LSE2_BITS), np.float32(2.0**31)
LOWEST = np.int32(-(2**31))


class Tokens(NamedTuple):
    """What the first sweep learns about each token."""

    inverse: np.ndarray  # f32, 2⁴⁰ ÷ the sum of exponentials in units of 2⁻⁴⁰
    factor: np.ndarray  # f32, 1 + 2z·lse
    nll: np.ndarray  # i64, units of 2⁻²⁴
    lse2: np.ndarray  # i64, units of 2⁻²⁰


@exclusive
def head(x: Rows, w: Weight, targets: np.ndarray, flag: np.ndarray) -> tuple[int, int]:
    """(Σ rint(nll·2²⁴), Σ rint(lse²·2²⁰)) over the unit's tokens, for targets i64[T]."""
    tokens = _tokens(len(targets))
    for span in _spans(x, w):
        _first_sweep(x, w, targets, np.float32(0), span, tokens, _room(span, w), flag)
    return int(tokens.nll.sum(dtype=np.int64)), int(tokens.lse2.sum(dtype=np.int64))


@exclusive
def head_backward(
    x: Rows, w: Weight, targets: np.ndarray, two_z: np.float32, sums: np.ndarray, flag: np.ndarray
) -> tuple[int, int, np.ndarray]:
    """head(), and the gradient of Σ (nll + z·lse²): (nll, lse2, dX bf16[T, D]); sums i64[V, D] gain the weight's.

    t = p·(1 + 2z·lse). dX contracts t·s_w, quantised by token, minus the target's row; dW contracts t·s_x, quantised by
    row over the unit's tokens, with the high slice of X, minus X at the target's row.
    """
    two_z = np.float32(two_z)
    tokens, spans = _tokens(len(targets)), _spans(x, w)
    dx = np.empty(x.hi.shape, np.uint16)
    hi_scale = high_scale(x)
    top = np.zeros(len(w.scale), np.int32)
    held = len(targets) * len(w.scale) <= HELD_LOGITS
    whole = _room(slice(0, len(targets)), w) if held else None
    for span in spans:
        e = _room(span, w) if whole is None else whole[span]
        _first_sweep(x, w, targets, two_z, span, tokens, e, flag)
        _input_gradient(e, w, targets[span], hi_scale[span], _cut(tokens, span), top, dx[span], flag)
    total = _WeightTotal(top, x.hi.shape[1], flag)
    for span in spans:
        e = _room(span, w) if whole is None else whole[span]
        if whole is None:
            _first_sweep(x, w, targets, two_z, span, tokens, e, flag)
        total.add(e, x.hi[span], hi_scale[span], _cut(tokens, span))
    add_gradient(total.high, total.low, 2, total.scale, sums, flag)
    low, slices = (x.hi, 1) if x.lo is None else (x.lo, 2)
    _subtract_targets(x.hi, low, slices, x.scale, targets, np.float32(len(targets)), sums, flag)
    return int(tokens.nll.sum(dtype=np.int64)), int(tokens.lse2.sum(dtype=np.int64)), dx


def _spans(x: Rows, w: Weight) -> list[slice]:
    return chunks(len(x.scale), max(CHUNK_TOKENS, CHUNK_LOGITS // len(w.scale)))


def _room(span: slice, w: Weight) -> np.ndarray:
    """Scratch for the logits, later exponentials, of some tokens: f32[span, V]."""
    return scratch("logits", (span.stop - span.start, len(w.scale)), np.float32)


def _tokens(count: int) -> Tokens:
    return Tokens(*(np.empty(count, dtype) for dtype in (np.float32, np.float32, np.int64, np.int64)))


def _cut(tokens: Tokens, span: slice) -> Tokens:
    return Tokens(*(field[span] for field in tokens))


def _first_sweep(
    x: Rows,
    w: Weight,
    targets: np.ndarray,
    two_z: np.float32,
    span: slice,
    tokens: Tokens,
    e: np.ndarray,
    flag: np.ndarray,
) -> None:
    """Fill in the tokens of a chunk, and e f32[chunk, V] = exp2((logit − peak)·log₂e)."""
    high, low = two_products("logits", x.hi[span], None if x.lo is None else x.lo[span], transposed(w))
    slices = 1 if x.lo is None else 2
    terms = np.float32(len(targets))
    # One by one: Numba silently drops what a parallel loop writes to arrays inside a tuple.
    _losses(high, low, slices, x.scale[span], w.scale, targets[span], two_z, terms, *_cut(tokens, span), e, flag)


@njit(**PARALLEL)
def _losses(high, low, slices, row_scale, column_scale, targets, two_z, terms, inverse, factor, nll, lse2, e, flag):
    for t in prange(e.shape[0]):
        row = e[t]
        value_row(high[t], low[t], slices, row)
        if checked_top(_scale_logits(row, row_scale[t], column_scale), flag) == 0:
            row[:] = F0
        peak, target = _peak(row), row[targets[t]]
        z = f32_of_i64(_exponentials(row, peak))
        lse = peak + (log2(z) - MASS_BITS) * LN_2
        loss, square = lse - target, lse * lse
        nll[t] = fixed_point(loss, GRADIENT_UNIT, terms, SUM_LIMIT)
        lse2[t] = fixed_point(square, LSE2_UNIT, terms, LSE2_LIMIT)
        if fixed_point_bad(loss, terms, SUM_LIMIT) or fixed_point_bad(square, terms, LSE2_LIMIT):
            flag[0] = 1
        inverse[t] = MASS_UNIT / z
        factor[t] = F1 + two_z * lse


@njit(**OPTIONS)
def _scale_logits(row, row_scale, column_scale):
    """row := (row · s_x)·s_w; returns the bits of the largest magnitude."""
    top = I0
    for j in range(row.size):
        x = (row[j] * row_scale) * column_scale[j]
        row[j] = x
        top = largest(top, magnitude(x))
    return top


@njit(**OPTIONS)
def _peak(row):
    """The largest of finite values."""
    key = LOWEST
    for j in range(row.size):
        key = largest(key, order_key(row[j]))
    return from_bits(key_bits(key))


@njit(**OPTIONS)
def _exponentials(row, peak):
    """row := exp2((row − peak)·log₂e); returns the sum in units of 2⁻⁴⁰."""
    total = np.int64(0)
    for j in range(row.size):
        e = exp2((row[j] - peak) * LOG2_E)
        row[j] = e
        total += i64_of_f32(rint(e * MASS_UNIT))
    return total


def _input_gradient(
    e: np.ndarray,
    w: Weight,
    targets: np.ndarray,
    hi_scale: np.ndarray,
    tokens: Tokens,
    top: np.ndarray,
    dx: np.ndarray,
    flag: np.ndarray,
) -> None:
    """dX of a chunk; `top` i32[V] takes in the chunk's maxima of the columns of t·s_x."""
    hi, lo = scratch("logit codes", e.shape, np.int8), scratch("logit low codes", e.shape, np.int8)
    scale = scratch("logit scales", (len(e),), np.float32)
    tops = scratch("chunk tops", ((len(e) + BLOCK - 1) // BLOCK, e.shape[1]), np.int32)
    _token_codes(e, tokens.inverse, tokens.factor, w.scale, hi_scale, hi, lo, scale, tops, flag)
    np.maximum(top, tops.max(axis=0), out=top)
    high, low = two_products("head dx", hi, lo, w.hi)
    _store_input_gradient(high, low, scale, w.hi, w.scale, targets, dx)


@njit(**PARALLEL)
def _token_codes(e, inverse, factor, weight_scale, hi_scale, hi, lo, scale, tops, flag):
    rows, width = e.shape
    done = 0
    for block in prange(tops.shape[0]):
        tops[block, :] = I0
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            top = _gradient_row(e[t], inverse[t], factor[t], weight_scale, hi_scale[t], work, tops[block])
            scale[t] = store_codes(work, checked_top(top, flag), 2, hi[t], lo[t])
        done += 1
    all_done(done, tops.shape[0])


@njit(**OPTIONS)
def _gradient_row(e, inverse, factor, weight_scale, hi_scale, out, tops):
    """out = t·s_w, whose largest magnitude is returned; tops takes in the magnitudes of t·s_x."""
    top = I0
    for j in range(e.size):
        t = (e[j] * inverse) * factor
        scaled = t * weight_scale[j]
        out[j] = scaled
        top = largest(top, magnitude(scaled))
        tops[j] = largest(tops[j], magnitude(t * hi_scale))
    return top


@njit(**PARALLEL)
def _store_input_gradient(high, low, scale, w, weight_scale, targets, dx):
    for t in prange(dx.shape[0]):
        _subtract_target_row(high[t], low[t], scale[t], w[targets[t]], weight_scale[targets[t]], dx[t])


@njit(**OPTIONS)
def _subtract_target_row(high, low, scale, w, weight_scale, dx):
    for j in range(dx.size):
        x = (f32_of_i32(high[j]) * F256 + f32_of_i32(low[j])) * scale
        dx[j] = bf16(x - f32_of_i8(w[j]) * weight_scale)


class _WeightTotal:
    """The softmax's part of dWᵀ, int32[D, V] for each slice, added up over chunks of tokens."""

    def __init__(self, top: np.ndarray, width: int, flag: np.ndarray) -> None:
        self.scale, self.inverse = column_scales(top, 2, flag)
        self.high, self.low = (scratch(f"head dw {name}", (width, len(top)), np.int32) for name in ("high", "low"))
        self.high[...], self.low[...] = 0, 0

    def add(self, e: np.ndarray, x: np.ndarray, hi_scale: np.ndarray, tokens: Tokens) -> None:
        """Contract a chunk's t·s_x, quantised by columns, with X's high slice int8[chunk, D]."""
        hi, lo = scratch("logit codes", e.shape, np.int8), scratch("logit low codes", e.shape, np.int8)
        _column_codes(e, tokens.inverse, tokens.factor, hi_scale, self.inverse, hi, lo)
        turned = np.ascontiguousarray(x.T)
        part = scratch("head dw part", self.high.shape, np.int32)
        for codes, total in ((hi, self.high), (lo, self.low)):
            multiply(turned, codes, part)
            np.add(total, part, out=total)


@njit(**PARALLEL)
def _column_codes(e, mass_inverse, factor, hi_scale, inverse, hi, lo):
    for t in prange(e.shape[0]):
        _column_codes_row(e[t], mass_inverse[t], factor[t], hi_scale[t], inverse, hi[t], lo[t])


@njit(**OPTIONS)
def _column_codes_row(e, mass_inverse, factor, hi_scale, inverse, hi, lo):
    for j in range(e.size):
        code = code_of(((e[j] * mass_inverse) * factor) * hi_scale, inverse[j])
        hi[j] = i8_of_i32(high_of(code))
        lo[j] = i8_of_i32(low_of(code))


@njit(**PARALLEL)
def _subtract_targets(hi, lo, slices, scale, targets, terms, sums, flag):
    """sums[y] −= rint(X̂·2²⁴) for each token's target y."""
    width = hi.shape[1]
    for block in prange((width + BLOCK - 1) // BLOCK):  # a block of columns, so that no two threads meet in a row
        part = slice(block * BLOCK, min(width, (block + 1) * BLOCK))
        for t in range(targets.size):
            _subtract_row(hi[t, part], lo[t, part], slices, scale[t], terms, sums[targets[t], part], flag)


@njit(**OPTIONS)
def _subtract_row(hi, lo, slices, scale, terms, sums, flag):
    top = I0
    for j in range(hi.size):
        # hi·256 + lo stays below 2²⁴, so its float32 sum is exact.
        code = f32_of_i8(hi[j]) if slices == 1 else f32_of_i8(hi[j]) * F256 + f32_of_i8(lo[j])
        x = code * scale
        top = largest(top, magnitude(x))
        sums[j] -= fixed_point(x, GRADIENT_UNIT, terms, SUM_LIMIT)
    if fixed_point_bad(from_bits(top), terms, SUM_LIMIT):
        flag[0] = 1
