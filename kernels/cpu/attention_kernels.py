"""The element-wise passes of attention, one compiled loop over rows each; the integer products happen between them.

A row is one query of one head (forward, dQ) or one key (dK, dV); its columns are the keys or the queries that its block
may see. Queries are ordered (query, head of the group), so r // group is the query. A row works only on the columns it
really sees, a contiguous run, and zeroes the codes of the others. An int32 product is overwritten in place by the
float32 made of it. Loops over columns hold no branch, and write so few arrays that the compiler's overlap checks let
it vectorise.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.numeric import (
    CODE_RECIPROCAL,
    F256,
    I0,
    OPTIONS,
    PARALLEL,
    SERIAL,
    add,
    all_done,
    as_floats,
    bf16,
    bits,
    checked_top,
    exp2,
    f32_of_bf16,
    f32_of_i32,
    fixed_sum_row,
    from_bits,
    high_of,
    i8_of_i32,
    i32_of_f32,
    inverse_of,
    key_bits,
    largest,
    low_of,
    magnitude,
    order_key,
    quantise_row,
    rint,
    store_codes,
)

COUNT, COUNT_INVERSE = np.float32(2.0**18), np.float32(2.0**-18)  # probabilities are summed in units of 2⁻¹⁸
UNIT = CODE_RECIPROCAL[1]
LOWEST = np.int32(-(2**31))
BLOCK = 32  # rows that one thread takes at a time where each is short
STRIP = 1024  # columns whose three rows stay in the first-level cache


@njit(**OPTIONS)
def _zero_outside(codes, first, last):
    """Codes 0 for the columns that a row does not see."""
    codes[:first] = 0
    codes[last:] = 0


@njit(**OPTIONS)
def _scores(s, q_scale, k_scale):
    """Products s int32[n] of one query become its scores, f32 in place; returns the largest."""
    x, top = as_floats(s), LOWEST
    for j in range(s.size):
        score = (f32_of_i32(s[j]) * q_scale) * k_scale[j]
        x[j] = score
        top = largest(top, order_key(score))
    return from_bits(key_bits(top))


@njit(**OPTIONS)
def _weigh(scores, peak, v_scale, inverse, hi, lo):
    """Codes of (p·v_scale[j])·inverse with p = exp2(score − peak); returns Σ rint(p·2¹⁸)."""
    count = I0
    for j in range(scores.size):
        p = exp2(scores[j] - peak)
        count = add(count, i32_of_f32(rint(p * COUNT)))
        code = i32_of_f32(rint((p * v_scale[j]) * inverse))
        hi[j] = i8_of_i32(high_of(code))
        lo[j] = i8_of_i32(low_of(code))
    return count


@njit(**SERIAL)
def weigh_rows(s, q_scale, k_scale, v_scale, v_top, query, key, group, window, codes, peak, total):
    """Softmax of one block of queries: products s int32[R, n] to codes of P·(s_v / S) in int8[2, R, n], hi and lo.

    The block's first query and key are `query` and `key`. q_scale f32[R]; k_scale, v_scale f32[n]; v_top f32[R / group]
    is each query's largest visible v_scale, S. Writes also peak f32[R] and total int32[R].
    """
    count = s.shape[0]
    for r in range(count):
        i = query + r // group
        first, last = max(i - window + 1, 0) - key, i + 1 - key
        seen, hi, lo = s[r, first:last], codes[0, r], codes[1, r]
        inverse = inverse_of(bits(v_top[r // group]), 2)
        peak[r] = _scores(seen, q_scale[r], k_scale[first:last])
        _zero_outside(hi, first, last)
        _zero_outside(lo, first, last)
        total[r] = _weigh(as_floats(seen), peak[r], v_scale[first:last], inverse, hi[first:last], lo[first:last])


@njit(**SERIAL)
def output_rows(product, v_top, total, group, out):
    """product int32[2, R, E], hi and lo, over the row's sum, to out bf16[R / group, group, E]."""
    _, count, width = product.shape
    for r in range(count):
        factor = (v_top[r // group] * UNIT) / (f32_of_i32(total[r]) * COUNT_INVERSE)
        high, low, to = product[0, r], product[1, r], out[r // group, r % group]
        for e in range(width):
            value = f32_of_i32(high[e]) * F256 + f32_of_i32(low[e])
            to[e] = bf16(value * factor)


@njit(**PARALLEL)
def prepare_rows(d_out, out, hi, lo, scale, delta, flag):
    """d_out, out bf16[R, E]: dO in two slices to hi, lo int8[R, E] with scale f32[R]; Σ dO·O to delta f32[R]."""
    count, width = d_out.shape
    done = 0
    for block in prange((count + BLOCK - 1) // BLOCK):
        x, y = np.empty(width, np.float32), np.empty(width, np.float32)
        for r in range(block * BLOCK, min(count, (block + 1) * BLOCK)):
            for e in range(width):
                x[e] = f32_of_bf16(d_out[r, e])
                y[e] = x[e] * f32_of_bf16(out[r, e])
            scale[r] = quantise_row(x, 2, hi[r], lo[r], flag)
            delta[r] = fixed_sum_row(y, flag)
        done += 1
    all_done(done, (count + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _query_terms(s, hi, lo, k_scale, v_scale, q_scale, peak, inverse, d_scale, delta):
    """Products s, hi, lo int32[n] of one query: s becomes dS·k_scale[j] (f32); returns the bits of the largest |·|."""
    x, top = as_floats(s), I0
    for j in range(s.size):
        p = exp2((f32_of_i32(s[j]) * q_scale) * k_scale[j] - peak) * inverse
        dp = ((f32_of_i32(hi[j]) * F256 + f32_of_i32(lo[j])) * d_scale) * v_scale[j]
        term = (p * (dp - delta)) * k_scale[j]
        x[j] = term
        top = largest(top, magnitude(term))
    return top


@njit(**OPTIONS)
def _store(x, top, first, last, hi, lo, flag):
    """Codes of the seen part x f32[last − first] of a row; returns its scale. Not finite: flag, codes and scale 0."""
    _zero_outside(hi, first, last)
    _zero_outside(lo, first, last)
    return store_codes(x, checked_top(top, flag), 2, hi[first:last], lo[first:last])


@njit(**SERIAL)
def query_gradient_rows(
    s, dp, q_scale, d_scale, delta, peak, inverse, k_scale, v_scale, query, key, group, window, codes, scale, flag
):
    """dS·s_k of one block of queries, quantised by row: codes int8[2, R, n], hi and lo, and scale f32[R].

    s int32[R, n] and dp int32[2, R, n] (hi and lo) are the products with keys and values, overwritten; q_scale,
    d_scale, delta, peak, inverse f32[R]; k_scale, v_scale f32[n].
    """
    count = s.shape[0]
    for r in range(count):
        i = query + r // group
        a, b = max(i - window + 1, 0) - key, i + 1 - key
        top = _query_terms(
            *(s[r, a:b], dp[0, r, a:b], dp[1, r, a:b], k_scale[a:b], v_scale[a:b]),
            *(q_scale[r], peak[r], inverse[r], d_scale[r], delta[r]),
        )
        scale[r] = _store(as_floats(s[r, a:b]), top, a, b, codes[0, r], codes[1, r], flag)


@njit(**OPTIONS)
def _probabilities(s, k_scale, q_scale, peak, inverse):
    """Products s int32[n] of one key become its probabilities, f32 in place."""
    x = as_floats(s)
    for j in range(s.size):
        x[j] = exp2((f32_of_i32(s[j]) * q_scale[j]) * k_scale - peak[j]) * inverse[j]


@njit(**OPTIONS)
def _key_terms(p, hi, lo, v_scale, q_scale, d_scale, delta):
    """Products hi, lo int32[n] of one value: hi becomes dS·q_scale[j] (f32); returns the bits of the largest |·|."""
    x, top = as_floats(hi), I0
    for j in range(hi.size):
        dp = ((f32_of_i32(hi[j]) * F256 + f32_of_i32(lo[j])) * d_scale[j]) * v_scale
        term = (p[j] * (dp - delta[j])) * q_scale[j]
        x[j] = term
        top = largest(top, magnitude(term))
    return top


@njit(**OPTIONS)
def _value_terms(p, d_scale):
    """p f32[n] becomes P·d_scale[j]; returns the bits of the largest |·|."""
    top = I0
    for j in range(p.size):
        p[j] = p[j] * d_scale[j]
        top = largest(top, magnitude(p[j]))
    return top


@njit(**SERIAL)
def key_gradient_rows(
    s, dp, k_scale, v_scale, q_scale, d_scale, delta, peak, inverse, group, window, codes, scale, flag
):
    """dS·s_q and P·s_dO of one block of keys, quantised by key: codes int8[4, B, n], hi, lo of each; scale f32[2, B].

    s int32[B, n] and dp int32[2, B, n] (hi and lo) are the products with all queries from the block's first key on that
    see any of its keys, ordered (query, head), overwritten; k_scale, v_scale f32[B]; the others f32[n].
    """
    count, n = s.shape
    for r in range(count):
        first, last = r * group, min(n, (r + window) * group)
        top_s, top_p = I0, I0
        for a in range(first, last, STRIP):
            b = min(a + STRIP, last)
            p, by_query = as_floats(s[r, a:b]), (q_scale[a:b], d_scale[a:b], delta[a:b])
            _probabilities(s[r, a:b], k_scale[r], q_scale[a:b], peak[a:b], inverse[a:b])
            top_s = largest(top_s, _key_terms(p, dp[0, r, a:b], dp[1, r, a:b], v_scale[r], *by_query))
            top_p = largest(top_p, _value_terms(p, d_scale[a:b]))
        x, y = as_floats(dp[0, r, first:last]), as_floats(s[r, first:last])
        scale[0, r] = _store(x, top_s, first, last, codes[0, r], codes[1, r], flag)
        scale[1, r] = _store(y, top_p, first, last, codes[2, r], codes[3, r], flag)


@njit(**SERIAL)
def scale_rows(product, scale, factor, group, out):
    """product int32[2, R, E], hi and lo, times scale[r]·factor, to out f32[R / group, group, E]."""
    _, count, width = product.shape
    for r in range(count):
        by = scale[r] * factor
        high, low, to = product[0, r], product[1, r], out[r // group, r % group]
        for e in range(width):
            to[e] = (f32_of_i32(high[e]) * F256 + f32_of_i32(low[e])) * by


@njit(**SERIAL)
def value_rows(product, scale, out):
    """product int32[3, R, E], hi·hi, lo·hi and hi·lo of P·s_dO and dO, times scale[r]·2⁸, to out bf16[R, E]."""
    _, count, width = product.shape
    for r in range(count):
        factor = scale[r] * F256
        high, cross, other, to = product[0, r], product[1, r], product[2, r], out[r]
        for e in range(width):
            value = f32_of_i32(high[e]) * F256 + f32_of_i32(add(cross[e], other[e]))
            to[e] = bf16(value * factor)
