"""The output head: logits, cross-entropy with z-loss, and their gradients, with no array of tokens × vocabulary.

By chunks of tokens, all threads on each: losses, and the gradient of the input. Then by blocks of the vocabulary, one
thread each: the gradient of the weight, for which the block's logits are made again: recomputed floats are the same
bits. What joins across chunks is integer: losses, and maxima of columns on bits.
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
    two_products,
    value_row,
)
from kernels.cpu.numeric import (
    F0,
    F1,
    F256,
    I0,
    INFINITE,
    LN_2,
    LOG2_E,
    OPTIONS,
    PARALLEL,
    SERIAL,
    all_done,
    as_floats,
    bf16,
    checked_top,
    choose,
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
from kernels.cpu.pool import spread
from kernels.cpu.products import multiply, scratch
from kernels.interface import HEAD_LIMIT, LSE2_BITS, Rows, Weight

CHUNK_LOGITS, CHUNK_TOKENS = 1 << 22, 128  # logits of a chunk, and its tokens at least
BLOCK_COLUMNS, BLOCK_TOKENS = 512, 512  # of the vocabulary, and how many of its logits exist at a time
MASS_BITS = np.float32(40)
MASS_UNIT = np.float32(2.0**40)
LSE2_UNIT, LSE2_LIMIT = np.float32(2.0**LSE2_BITS), np.float32(2.0**31)
PART_LIMIT = np.float32(2.0**HEAD_LIMIT)  # of the weight's gradient: the softmax's part, the target's part
LOWEST = np.int32(-(2**31))
NOT_FINITE = np.float32(np.inf)


class Tokens(NamedTuple):
    """What the first sweep learns about each token."""

    peak: np.ndarray  # f32, the largest logit; +∞ where one is not finite, and all count as 0
    inverse: np.ndarray  # f32, 2⁴⁰ ÷ the sum of exponentials in units of 2⁻⁴⁰
    factor: np.ndarray  # f32, 1 + 2z·lse
    nll: np.ndarray  # i64, units of 2⁻²⁴
    lse2: np.ndarray  # i64, units of 2⁻²⁰

    @classmethod
    def empty(cls, count: int) -> Tokens:
        """Room for `count` tokens."""
        return cls(*(np.empty(count, dtype) for dtype in (np.float32,) * 3 + (np.int64,) * 2))

    def cut(self, span: slice) -> Tokens:
        """Those of a span."""
        return Tokens(*(field[span] for field in self))

    def totals(self) -> tuple[int, int]:
        """(Σ nll, Σ lse2)."""
        return int(self.nll.sum(dtype=np.int64)), int(self.lse2.sum(dtype=np.int64))


@exclusive
def head(x: Rows, w: Weight, targets: np.ndarray, flag: np.ndarray) -> tuple[int, int]:
    """(Σ rint(nll·2²⁴), Σ rint(lse²·2²⁰)) over the unit's tokens, for targets i64[T]."""
    tokens = Tokens.empty(len(targets))
    for span in _spans(x, w):
        _losses_of(x, w, targets, np.float32(0), span, tokens, flag)
    return tokens.totals()


@exclusive
def head_backward(
    x: Rows, w: Weight, targets: np.ndarray, two_z: np.float32, sums: np.ndarray, flag: np.ndarray
) -> tuple[int, int, np.ndarray]:
    """head(), and the gradient of Σ (nll + z·lse²): (nll, lse2, dX bf16[T, D]); sums i64[V, D] gain the weight's.

    t = p·(1 + 2z·lse). dX contracts t·s_w, quantised by token, minus the target's row; dW contracts t·s_x, quantised by
    row over the unit's tokens, with the high slice of X, minus X at the target's row.
    """
    tokens = Tokens.empty(len(targets))
    dx = np.empty(x.hi.shape, np.uint16)
    hi_scale = high_scale(x)
    top = np.zeros(len(w.scale), np.int32)
    for span in _spans(x, w):
        e = _losses_of(x, w, targets, np.float32(two_z), span, tokens, flag)
        _input_gradient(e, w, targets[span], hi_scale[span], tokens.cut(span), top, dx[span], flag)
    blocks = chunks(len(w.scale), BLOCK_COLUMNS)
    spread(_add_weight_gradient, [(x, w, block, hi_scale, tokens, top[block], sums[block], flag) for block in blocks])
    low, slices = (x.hi, 1) if x.lo is None else (x.lo, 2)
    _subtract_targets(x.hi, low, slices, x.scale, targets, np.float32(len(targets)), sums, flag)
    return *tokens.totals(), dx


def _spans(x: Rows, w: Weight) -> list[slice]:
    return chunks(len(x.scale), max(CHUNK_TOKENS, CHUNK_LOGITS // len(w.scale)))


def _logits(x: Rows, w: Weight, span: slice, block: slice) -> tuple[np.ndarray, np.ndarray]:
    """The integer products of a span of tokens with a block of the vocabulary, high and low slice."""
    return two_products("logits", x.hi[span], None if x.lo is None else x.lo[span], w.hi[block].T)


def _losses_of(
    x: Rows, w: Weight, targets: np.ndarray, two_z: np.float32, span: slice, tokens: Tokens, flag: np.ndarray
) -> np.ndarray:
    """Fill in the tokens of a span; returns exp2((logit − peak)·log₂e), f32[span, V], in the products' memory."""
    high, low = _logits(x, w, span, slice(None))
    slices, terms = 1 if x.lo is None else 2, np.float32(len(targets))
    # One by one: Numba silently drops what a parallel loop writes to arrays inside a tuple.
    _losses(high, low, slices, x.scale[span], w.scale, targets[span], two_z, terms, *tokens.cut(span), flag)
    return high.view(np.float32)


@njit(**PARALLEL)
def _losses(high, low, slices, row_scale, column_scale, targets, two_z, terms, peak, inverse, factor, nll, lse2, flag):
    for t in prange(high.shape[0]):
        row = as_floats(high[t])
        largest_bits = _logits_row(high[t], low[t], slices, row_scale[t], column_scale)
        if checked_top(largest_bits, flag) == 0:
            row[:] = F0
        top, target = _peak(row), row[targets[t]]
        peak[t] = choose(largest_bits < INFINITE, top, NOT_FINITE)
        z = f32_of_i64(_exponentials(row, top))
        lse = top + (log2(z) - MASS_BITS) * LN_2
        loss, square = lse - target, lse * lse
        nll[t] = fixed_point(loss, GRADIENT_UNIT, terms, SUM_LIMIT)
        lse2[t] = fixed_point(square, LSE2_UNIT, terms, LSE2_LIMIT)
        if fixed_point_bad(loss, terms, SUM_LIMIT) or fixed_point_bad(square, terms, LSE2_LIMIT):
            flag[0] = 1
        inverse[t] = MASS_UNIT / z
        factor[t] = F1 + two_z * lse


@njit(**OPTIONS)
def _logits_row(high, low, slices, row_scale, column_scale):
    """Products of a token become its logits (value · s_x)·s_w, f32 in place; returns the bits of the largest |·|."""
    row = as_floats(high)
    value_row(high, low, slices, row)
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
    hi, lo = (scratch(f"logit {name} codes", e.shape, np.int8) for name in ("high", "low"))
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


def _add_weight_gradient(
    x: Rows,
    w: Weight,
    block: slice,
    hi_scale: np.ndarray,
    tokens: Tokens,
    top: np.ndarray,
    sums: np.ndarray,
    flag: np.ndarray,
) -> None:
    """The softmax's part of dW of a block of the vocabulary, from the block's maxima of t·s_x over the unit."""
    scale, inverse = column_scales(top, 2, flag)
    hi, lo = (scratch(f"logit {name} codes", (len(hi_scale), len(top)), np.int8) for name in ("high", "low"))
    slices = 1 if x.lo is None else 2
    for span in chunks(len(hi_scale), BLOCK_TOKENS):
        high, low = _logits(x, w, span, block)
        known = tokens.cut(span)
        _column_codes(
            *(high, low, slices, x.scale[span], w.scale[block]),
            *(known.peak, known.inverse, known.factor, hi_scale[span], inverse, hi[span], lo[span]),
        )
    shape = (len(top), x.hi.shape[1])
    products = (multiply(c.T, x.hi, scratch(f"head dw {n}", shape, np.int32)) for n, c in (("high", hi), ("low", lo)))
    add_gradient(*products, 2, scale, PART_LIMIT, sums, flag)


@njit(**SERIAL)
def _column_codes(high, low, slices, row_scale, column_scale, peak, mass_inverse, factor, hi_scale, inverse, hi, lo):
    for t in range(high.shape[0]):
        row = as_floats(high[t])
        _logits_row(high[t], low[t], slices, row_scale[t], column_scale)
        _column_codes_row(row, peak[t], mass_inverse[t], factor[t], hi_scale[t], inverse, hi[t], lo[t])


@njit(**OPTIONS)
def _column_codes_row(row, peak, mass_inverse, factor, hi_scale, inverse, hi, lo):
    alive = peak < NOT_FINITE
    for j in range(row.size):
        e = exp2(choose(alive, (row[j] - peak) * LOG2_E, F0))
        code = code_of(((e * mass_inverse) * factor) * hi_scale, inverse[j])
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
        sums[j] -= fixed_point(x, GRADIENT_UNIT, terms, PART_LIMIT)
    if fixed_point_bad(from_bits(top), terms, PART_LIMIT):
        flag[0] = 1
