"""The gradients of exact attention, once the maxima of their rows and columns are known.

Queries: a block of them against the keys that it sees. Keys and values: a block of them, as rows, against the queries
of all heads of the group that see it; so codes by column are codes of rows, and lie in registers as the product's left
operand. Where a maximum was not finite the codes are anything, and the results 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.nvidia.attention_tiles import (
    in_sight,
    keys_in_reach,
    numbers_of,
    queries_in_reach,
    rows_of,
    score_gradient,
    slices_of,
    split_block,
    turned_of,
    two_slices,
    weights,
)
from kernels.nvidia.numbers import LN_2, bf16, checked_top, inverse_of, scale_of


@triton.jit
def query_gradients(
    q, k, k_turned, k_scale, v, v_scale, d_hi, d_lo, numbers, row_top, dq, flag, S, P, W, SIZE, ROOT,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """dq f32[T·H, E] of BI queries of one head."""
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BI  # the longest rows first
    place, window, head = tl.program_id(0), tl.program_id(0) // H, tl.program_id(0) % H
    kv = head // (H // K)
    i, e = start + tl.arange(0, BI), tl.arange(0, EP)
    at = (window * S + tl.minimum(i, S - 1)) * H + head
    tiles = (rows_of(q, at, e, E, EP), rows_of(d_hi, place * P + i, e, E, EP), rows_of(d_lo, place * P + i, e, E, EP))
    s_q, peak, inverse, s_d, delta = numbers_of(numbers, place * P + i, SIZE)
    top = checked_top(tl.load(row_top + place * P + i), flag)
    by_row = (s_q[:, None], peak[:, None], inverse[:, None], s_d[:, None], delta[:, None], inverse_of(top, 2)[:, None])
    x = (k, k_turned, k_scale, v, v_scale, window * K + kv, window * S * K + kv, i, e, S, P, W)
    first, inner, outer, last = keys_in_reach(start, S, W, BI, BJ)
    hi, lo = tl.zeros((BI, EP), tl.int32), tl.zeros((BI, EP), tl.int32)
    for index in range(inner - first + tl.maximum(last - outer, 0)):
        hi, lo = _add_keys(x, tiles, by_row, split_block(index, first, inner, outer), hi, lo, K, E, EP, BJ, True)
    for b in range(inner, outer):
        hi, lo = _add_keys(x, tiles, by_row, b, hi, lo, K, E, EP, BJ, False)
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * ROOT)[:, None], 0.0)
    tl.store(dq + at[:, None] * E + e[None, :], value, mask=(i < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_keys(
    x, tiles, by_row, b, hi, lo,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BJ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of the codes' two slices times k, with block b of the keys."""
    k, k_turned, k_scale, v, v_scale, place, row, i, e, S, P, W = x
    q_tile, d_hi, d_lo = tiles
    s_q, peak, inverse, s_d, delta, to_code = by_row
    j = b * BJ + tl.arange(0, BJ)
    at = row + tl.minimum(j, S - 1) * K
    k_tile, v_tile = tl.trans(rows_of(k, at, e, E, EP)), tl.trans(rows_of(v, at, e, E, EP))
    turned = tl.trans(turned_of(k_turned, place, j, e, P, E, EP))
    s_k, s_v = tl.load(k_scale + place * P + j)[None, :], tl.load(v_scale + place * P + j)[None, :]
    product = tl.dot(q_tile, k_tile, out_dtype=tl.int32)
    of_hi, of_lo = tl.dot(d_hi, v_tile, out_dtype=tl.int32), tl.dot(d_lo, v_tile, out_dtype=tl.int32)
    ds = score_gradient(weights(product, s_q, s_k, peak, inverse), of_hi, of_lo, s_d, s_v, delta)
    if MASKED:
        ds = tl.where(in_sight(i, j, W), ds, 0.0)
    c_hi, c_lo = slices_of((ds * s_k) * to_code)
    return tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)


@triton.jit
def key_gradients(
    q, q_turned, k, k_scale, v, v_scale, d_hi, d_lo, numbers, s_top, dk, flag, S, P, W, SIZE,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """dk f32[T·K, E] of BJ keys."""
    place, window, kv = tl.program_id(0), tl.program_id(0) // K, tl.program_id(0) % K
    start, e = tl.program_id(1) * BJ, tl.arange(0, EP)
    j = start + tl.arange(0, BJ)
    at = (window * S + tl.minimum(j, S - 1)) * K + kv
    top = checked_top(tl.load(s_top + place * P + j), flag)
    tiles = (rows_of(k, at, e, E, EP), rows_of(v, at, e, E, EP), inverse_of(top, 2)[:, None])
    s_k, s_v = tl.load(k_scale + place * P + j)[:, None], tl.load(v_scale + place * P + j)[:, None]
    x = (q, q_turned, d_hi, d_lo, numbers, s_k, s_v, window * S, kv * (H // K), window * H + kv * (H // K))
    y = (j, e, S, P, W, SIZE)
    first, inner, outer, last = queries_in_reach(start, S, W, BI, BJ)
    hi, lo = tl.zeros((BJ, EP), tl.int32), tl.zeros((BJ, EP), tl.int32)
    edge = inner - first + tl.maximum(last - outer, 0)
    for index in range(edge * (H // K)):
        b = split_block(index % edge, first, inner, outer)
        hi, lo = _add_queries(x, y, tiles, index // edge, b, hi, lo, H, E, EP, BI, True)
    whole = outer - inner
    for index in range(whole * (H // K)):
        hi, lo = _add_queries(x, y, tiles, index // whole, inner + index % whole, hi, lo, H, E, EP, BI, False)
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * LN_2)[:, None], 0.0)
    tl.store(dk + at[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_queries(
    x, y, tiles, g, b, hi, lo,
    H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of the codes' two slices times q, with block b of the queries of the group's head g."""
    q, q_turned, d_hi, d_lo, numbers, s_k, s_v, token, head, place = x
    j, e, S, P, W, SIZE = y
    k_tile, v_tile, to_code = tiles
    i = b * BI + tl.arange(0, BI)
    at = (place + g) * P + i
    q_tile = tl.trans(rows_of(q, (token + tl.minimum(i, S - 1)) * H + head + g, e, E, EP))
    hi_tile, lo_tile = tl.trans(rows_of(d_hi, at, e, E, EP)), tl.trans(rows_of(d_lo, at, e, E, EP))
    turned = tl.trans(turned_of(q_turned, place + g, i, e, P, E, EP))
    s_q, peak, inverse, s_d, delta = numbers_of(numbers, at, SIZE)
    product = tl.dot(k_tile, q_tile, out_dtype=tl.int32)
    of_hi, of_lo = tl.dot(v_tile, hi_tile, out_dtype=tl.int32), tl.dot(v_tile, lo_tile, out_dtype=tl.int32)
    p = weights(product, s_q[None, :], s_k, peak[None, :], inverse[None, :])
    ds = score_gradient(p, of_hi, of_lo, s_d[None, :], s_v, delta[None, :])
    if MASKED:
        ds = tl.where(tl.trans(in_sight(i, j, W)), ds, 0.0)
    c_hi, c_lo = slices_of((ds * s_q[None, :]) * to_code)
    return tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)


@triton.jit
def value_gradients(
    q, k, k_scale, hi_turned, lo_turned, numbers, p_top, dv, S, P, W, SIZE,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """dv bf16[T·K, E] of BJ keys."""
    place, window, kv = tl.program_id(0), tl.program_id(0) // K, tl.program_id(0) % K
    start, e = tl.program_id(1) * BJ, tl.arange(0, EP)
    j = start + tl.arange(0, BJ)
    at = (window * S + tl.minimum(j, S - 1)) * K + kv
    top = tl.load(p_top + place * P + j)  # finite: P ≤ 1, and dO's rows were checked
    k_tile, to_code = rows_of(k, at, e, E, EP), inverse_of(top, 2)[:, None]
    s_k = tl.load(k_scale + place * P + j)[:, None]
    x = (q, k_tile, s_k, to_code, hi_turned, lo_turned, numbers, window * S, kv * (H // K), window * H + kv * (H // K))
    y = (j, e, S, P, W, SIZE)
    first, inner, outer, last = queries_in_reach(start, S, W, BI, BJ)
    hi, cross = tl.zeros((BJ, EP), tl.int32), tl.zeros((BJ, EP), tl.int32)
    edge = inner - first + tl.maximum(last - outer, 0)
    for index in range(edge * (H // K)):
        b = split_block(index % edge, first, inner, outer)
        hi, cross = _add_outputs(x, y, index // edge, b, hi, cross, H, E, EP, BI, True)
    whole = outer - inner
    for index in range(whole * (H // K)):
        hi, cross = _add_outputs(x, y, index // whole, inner + index % whole, hi, cross, H, E, EP, BI, False)
    value = bf16(two_slices(hi, cross) * (scale_of(top, 2) * 256.0)[:, None])
    tl.store(dv + at[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_outputs(
    x, y, g, b, high, cross, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """hi·hi and lo·hi + hi·lo of the codes and dO, with block b of the queries of the group's head g."""
    q, k_tile, s_k, to_code, hi_turned, lo_turned, numbers, token, head, place = x
    j, e, S, P, W, SIZE = y
    i = b * BI + tl.arange(0, BI)
    at = (place + g) * P + i
    q_tile = tl.trans(rows_of(q, (token + tl.minimum(i, S - 1)) * H + head + g, e, E, EP))
    d_hi = tl.trans(turned_of(hi_turned, place + g, i, e, P, E, EP))
    d_lo = tl.trans(turned_of(lo_turned, place + g, i, e, P, E, EP))
    s_q, peak, inverse, s_d, _ = numbers_of(numbers, at, SIZE)
    product = tl.dot(k_tile, q_tile, out_dtype=tl.int32)
    p = weights(product, s_q[None, :], s_k, peak[None, :], inverse[None, :])
    if MASKED:
        p = tl.where(tl.trans(in_sight(i, j, W)), p, 0.0)
    c_hi, c_lo = slices_of((p * s_d[None, :]) * to_code)
    cross = tl.dot(c_hi, d_lo, tl.dot(c_lo, d_hi, cross, out_dtype=tl.int32), out_dtype=tl.int32)
    return tl.dot(c_hi, d_hi, high, out_dtype=tl.int32), cross
