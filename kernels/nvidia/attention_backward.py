"""The gradients of exact attention. Definition: kernels/reference/attention.py.

Four sweeps over the same band, each with its scores and probabilities anew, since storing them costs more:

    maxima   a block of keys against all queries that see it: row maxima of dS·s_k, column maxima of dS·s_q and P·s_dO
    dQ       a block of queries against the keys that it sees
    dK, dV   a block of keys, as rows, against the queries of all heads of the group that see it: codes by column are
             then codes of rows, and lie in registers as the product's left operand

Rows or columns whose maximum is not finite raise the flag; whatever their codes are, their results are 0.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Attended, AttentionShape, Rows
from kernels.nvidia.attention_tiles import (
    Laid,
    common,
    exp2_down,
    in_sight,
    keys_in_reach,
    padded,
    padded_width,
    queries_in_reach,
    rows_of,
    slices_of,
    split_block,
    turned_of,
    two_slices,
)
from kernels.nvidia.numbers import (
    LN_2,
    bf16,
    ceil_log2,
    checked_top,
    code_of,
    empty,
    f32_of_bf16,
    fixed_sum_rows,
    high_of,
    inverse_of,
    launch,
    low_of,
    magnitude,
    scale_of,
    zeros,
)

MAXIMA = {"I": 64, "J": 64, "num_warps": 4, "num_stages": 2}
OF_QUERIES = {"I": 64, "J": 32, "num_warps": 4, "num_stages": 3}
OF_KEYS = {"I": 32, "J": 64, "num_warps": 4, "num_stages": 2}
OF_VALUES = {"I": 32, "J": 64, "num_warps": 4, "num_stages": 2}
PREPARED = 32  # tokens of a block of the preparation
Q_SCALE, PEAK, INVERSE, D_SCALE, DELTA = (tl.constexpr(plane) for plane in range(5))


@triton.jit
def _prepare(
    d_out, out, q_scale, peak, total, numbers, d_hi, d_lo, hi_turned, lo_turned, flag, S, P, SIZE,
    H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, LOG_E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """B tokens of one head: dO in two slices, as rows [N, H, P, E] and turned; the five numbers of each row."""
    place, e = tl.program_id(1), tl.arange(0, EP)
    t = tl.program_id(0) * B + tl.arange(0, B)
    inside, wide = t < S, (e < E)[None, :]
    row = (place // H * S + t) * H + place % H
    at, whole = row[:, None] * E + e[None, :], inside[:, None] & wide
    d = f32_of_bf16(tl.load(d_out + at, mask=whole, other=0))
    o = f32_of_bf16(tl.load(out + at, mask=whole, other=0))
    top = checked_top(tl.max(magnitude(d), 1), flag)
    code = code_of(d, inverse_of(top, 2)[:, None])
    hi, lo = high_of(code), low_of(code)
    to = place * P + t
    tl.store(d_hi + to[:, None] * E + e[None, :], hi, mask=wide)
    tl.store(d_lo + to[:, None] * E + e[None, :], lo, mask=wide)
    turned = (place * E + e)[:, None] * P + t[None, :]
    tl.store(hi_turned + turned, tl.trans(hi), mask=(e < E)[:, None])
    tl.store(lo_turned + turned, tl.trans(lo), mask=(e < E)[:, None])
    counted = tl.load(total + row, mask=inside, other=1).to(tl.float32) * (2.0**-18)
    tl.store(numbers + Q_SCALE * SIZE + to, tl.load(q_scale + row, mask=inside, other=0.0))
    tl.store(numbers + PEAK * SIZE + to, tl.load(peak + row, mask=inside, other=0.0))
    tl.store(numbers + INVERSE * SIZE + to, tl.where(inside, tl.div_rn(1.0, counted), 0.0))
    tl.store(numbers + D_SCALE * SIZE + to, scale_of(top, 2))
    tl.store(numbers + DELTA * SIZE + to, fixed_sum_rows(d * o, LOG_E, flag))


@triton.jit
def _weights(product, q_scale, k_scale, peak, inverse):
    """P = exp2(S − peak)·inverse from products q·k; the numbers are broadcast to the tile already."""
    return exp2_down((product.to(tl.float32) * q_scale) * k_scale - peak) * inverse


@triton.jit
def _score_gradient(p, hi, lo, d_scale, v_scale, delta):
    """dS = P·(dP − delta) from P and the products hi·v, lo·v, which are below 2²³: their sum in int32 rounds once, as
    that of their float32 does."""
    dp = ((hi * 256 + lo).to(tl.float32) * d_scale) * v_scale
    return p * (dp - delta)


@triton.jit
def _maxima(
    q, k, k_scale, v, v_scale, d_hi, d_lo, numbers, row_top, s_top, p_top, S, P, W, SIZE,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Bits of the largest |dS·s_k| of each query, |dS·s_q| and P·s_dO of each key, i32 [N, ·, P], from zeros: J keys
    against one head's queries."""
    window, head = tl.program_id(0) // H, tl.program_id(0) % H
    kv, place = window * K + head // (H // K), tl.program_id(0)
    start, e = tl.program_id(1) * J, tl.arange(0, EP)
    j = start + tl.arange(0, J)
    at = (window * S + tl.minimum(j, S - 1)) * K + head // (H // K)
    k_tile, v_tile = tl.trans(rows_of(k, at, e, E, EP)), tl.trans(rows_of(v, at, e, E, EP))
    s_k, s_v = tl.load(k_scale + kv * P + j)[None, :], tl.load(v_scale + kv * P + j)[None, :]
    x = (q, k_tile, v_tile, s_k, s_v, d_hi, d_lo, numbers + place * P, row_top + place * P, window * S * H + head, e, j)
    y = (place * P, S, W, SIZE)
    first, inner, outer, last = queries_in_reach(start, S, W, I, J)
    of_s, of_p = tl.zeros((I, J), tl.int32), tl.zeros((I, J), tl.int32)
    for index in range(inner - first + tl.maximum(last - outer, 0)):
        of_s, of_p = _meet(x, y, split_block(index, first, inner, outer), of_s, of_p, H, E, EP, I, True)
    for b in range(inner, outer):
        of_s, of_p = _meet(x, y, b, of_s, of_p, H, E, EP, I, False)
    tl.atomic_max(s_top + kv * P + j, tl.max(of_s, 0), sem="relaxed")
    tl.atomic_max(p_top + kv * P + j, tl.max(of_p, 0), sem="relaxed")


@triton.jit
def _meet(x, y, b, of_s, of_p, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, M: tl.constexpr):
    """Block b of the queries: stores its row maxima; returns the tiles of running maxima."""
    q, k_tile, v_tile, s_k, s_v, d_hi, d_lo, numbers, row_top, row, e, j = x
    base, S, W, SIZE = y
    i = b * I + tl.arange(0, I)
    s_q, peak = tl.load(numbers + Q_SCALE * SIZE + i)[:, None], tl.load(numbers + PEAK * SIZE + i)[:, None]
    inverse, s_d = tl.load(numbers + INVERSE * SIZE + i)[:, None], tl.load(numbers + D_SCALE * SIZE + i)[:, None]
    delta = tl.load(numbers + DELTA * SIZE + i)[:, None]
    q_tile = rows_of(q, row + tl.minimum(i, S - 1) * H, e, E, EP)
    hi_tile, lo_tile = rows_of(d_hi, base + i, e, E, EP), rows_of(d_lo, base + i, e, E, EP)
    product = tl.dot(q_tile, k_tile, out_dtype=tl.int32)
    hi, lo = tl.dot(hi_tile, v_tile, out_dtype=tl.int32), tl.dot(lo_tile, v_tile, out_dtype=tl.int32)
    p = _weights(product, s_q, s_k, peak, inverse)
    ds = _score_gradient(p, hi, lo, s_d, s_v, delta)
    if M:
        seen = in_sight(i, j, W)
        p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
    tl.atomic_max(row_top + i, tl.max(magnitude(ds * s_k), 1), sem="relaxed")
    return tl.maximum(of_s, magnitude(ds * s_q)), tl.maximum(of_p, magnitude(p * s_d))


@triton.jit
def _queries(
    q, k, k_turned, k_scale, v, v_scale, d_hi, d_lo, numbers, row_top, dq, flag, S, P, W, SIZE, ROOT,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """dq f32[T·H, E] of I queries of one head."""
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * I  # the longest rows first
    place, window, head = tl.program_id(0), tl.program_id(0) // H, tl.program_id(0) % H
    kv = head // (H // K)
    i, e = start + tl.arange(0, I), tl.arange(0, EP)
    at, n = (window * S + tl.minimum(i, S - 1)) * H + head, numbers + place * P + i
    tiles = (rows_of(q, at, e, E, EP), rows_of(d_hi, place * P + i, e, E, EP), rows_of(d_lo, place * P + i, e, E, EP))
    s_q, peak, inverse = tl.load(n + Q_SCALE * SIZE), tl.load(n + PEAK * SIZE), tl.load(n + INVERSE * SIZE)
    s_d, delta = tl.load(n + D_SCALE * SIZE), tl.load(n + DELTA * SIZE)
    top = checked_top(tl.load(row_top + place * P + i), flag)
    by_row = (s_q[:, None], peak[:, None], inverse[:, None], s_d[:, None], delta[:, None], inverse_of(top, 2)[:, None])
    x = (k, k_turned, k_scale, v, v_scale, window * K + kv, window * S * K + kv, i, e, S, P, W)
    first, inner, outer, last = keys_in_reach(start, S, W, I, J)
    hi, lo = tl.zeros((I, EP), tl.int32), tl.zeros((I, EP), tl.int32)
    for index in range(inner - first + tl.maximum(last - outer, 0)):
        hi, lo = _add_keys(x, tiles, by_row, split_block(index, first, inner, outer), hi, lo, K, E, EP, J, True)
    for b in range(inner, outer):
        hi, lo = _add_keys(x, tiles, by_row, b, hi, lo, K, E, EP, J, False)
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * ROOT)[:, None], 0.0)
    tl.store(dq + at[:, None] * E + e[None, :], value, mask=(i < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_keys(
    x, tiles, by_row, b, hi, lo, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, J: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The sums of the codes' two slices times k, with block b of the keys."""
    k, k_turned, k_scale, v, v_scale, place, row, i, e, S, P, W = x
    q_tile, d_hi, d_lo = tiles
    s_q, peak, inverse, s_d, delta, to_code = by_row
    j = b * J + tl.arange(0, J)
    at = row + tl.minimum(j, S - 1) * K
    k_tile, v_tile = tl.trans(rows_of(k, at, e, E, EP)), tl.trans(rows_of(v, at, e, E, EP))
    turned = tl.trans(turned_of(k_turned, place, j, e, P, E, EP))
    s_k, s_v = tl.load(k_scale + place * P + j)[None, :], tl.load(v_scale + place * P + j)[None, :]
    product = tl.dot(q_tile, k_tile, out_dtype=tl.int32)
    of_hi, of_lo = tl.dot(d_hi, v_tile, out_dtype=tl.int32), tl.dot(d_lo, v_tile, out_dtype=tl.int32)
    ds = _score_gradient(_weights(product, s_q, s_k, peak, inverse), of_hi, of_lo, s_d, s_v, delta)
    if MASKED:
        ds = tl.where(in_sight(i, j, W), ds, 0.0)
    c_hi, c_lo = slices_of((ds * s_k) * to_code)
    return tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)


@triton.jit
def _keys(
    q, q_turned, k, k_scale, v, v_scale, d_hi, d_lo, numbers, s_top, dk, flag, S, P, W, SIZE,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """dk f32[T·K, E] of J keys."""
    place, window, kv = tl.program_id(0), tl.program_id(0) // K, tl.program_id(0) % K
    start, e = tl.program_id(1) * J, tl.arange(0, EP)
    j = start + tl.arange(0, J)
    at = (window * S + tl.minimum(j, S - 1)) * K + kv
    top = checked_top(tl.load(s_top + place * P + j), flag)
    tiles = (rows_of(k, at, e, E, EP), rows_of(v, at, e, E, EP), inverse_of(top, 2)[:, None])
    s_k, s_v = tl.load(k_scale + place * P + j)[:, None], tl.load(v_scale + place * P + j)[:, None]
    x = (q, q_turned, d_hi, d_lo, numbers, s_k, s_v, window * S, window * H + kv * (H // K), kv * (H // K), j, e, S, P, W, SIZE)
    first, inner, outer, last = queries_in_reach(start, S, W, I, J)
    hi, lo = tl.zeros((J, EP), tl.int32), tl.zeros((J, EP), tl.int32)
    edge = inner - first + tl.maximum(last - outer, 0)
    for index in range(edge * (H // K)):
        b = split_block(index % edge, first, inner, outer)
        hi, lo = _add_queries(x, tiles, index // edge, b, hi, lo, H, E, EP, I, True)
    whole = outer - inner
    for index in range(whole * (H // K)):
        hi, lo = _add_queries(x, tiles, index // whole, inner + index % whole, hi, lo, H, E, EP, I, False)
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * LN_2)[:, None], 0.0)
    tl.store(dk + at[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_queries(
    x, tiles, g, b, hi, lo, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The sums of the codes' two slices times q, with block b of the queries of the group's head g."""
    q, q_turned, d_hi, d_lo, numbers, s_k, s_v, token, place, head, j, e, S, P, W, SIZE = x
    k_tile, v_tile, to_code = tiles
    i = b * I + tl.arange(0, I)
    at = (place + g) * P + i
    q_tile = tl.trans(rows_of(q, (token + tl.minimum(i, S - 1)) * H + head + g, e, E, EP))
    hi_tile, lo_tile = tl.trans(rows_of(d_hi, at, e, E, EP)), tl.trans(rows_of(d_lo, at, e, E, EP))
    turned = tl.trans(turned_of(q_turned, place + g, i, e, P, E, EP))
    s_q, peak = tl.load(numbers + Q_SCALE * SIZE + at)[None, :], tl.load(numbers + PEAK * SIZE + at)[None, :]
    inverse, s_d = tl.load(numbers + INVERSE * SIZE + at)[None, :], tl.load(numbers + D_SCALE * SIZE + at)[None, :]
    delta = tl.load(numbers + DELTA * SIZE + at)[None, :]
    product = tl.dot(k_tile, q_tile, out_dtype=tl.int32)
    of_hi, of_lo = tl.dot(v_tile, hi_tile, out_dtype=tl.int32), tl.dot(v_tile, lo_tile, out_dtype=tl.int32)
    ds = _score_gradient(_weights(product, s_q, s_k, peak, inverse), of_hi, of_lo, s_d, s_v, delta)
    if MASKED:
        ds = tl.where(tl.trans(in_sight(i, j, W)), ds, 0.0)
    c_hi, c_lo = slices_of((ds * s_q) * to_code)
    return tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)


@triton.jit
def _values(
    q, k, k_scale, hi_turned, lo_turned, numbers, p_top, dv, flag, S, P, W, SIZE,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """dv bf16[T·K, E] of J keys."""
    place, window, kv = tl.program_id(0), tl.program_id(0) // K, tl.program_id(0) % K
    start, e = tl.program_id(1) * J, tl.arange(0, EP)
    j = start + tl.arange(0, J)
    at = (window * S + tl.minimum(j, S - 1)) * K + kv
    top = checked_top(tl.load(p_top + place * P + j), flag)
    k_tile, to_code = rows_of(k, at, e, E, EP), inverse_of(top, 2)[:, None]
    s_k = tl.load(k_scale + place * P + j)[:, None]
    x = (q, k_tile, s_k, to_code, hi_turned, lo_turned, numbers, window * S, window * H + kv * (H // K), kv * (H // K), j, e, S, P, W, SIZE)
    first, inner, outer, last = queries_in_reach(start, S, W, I, J)
    hi, cross = tl.zeros((J, EP), tl.int32), tl.zeros((J, EP), tl.int32)
    edge = inner - first + tl.maximum(last - outer, 0)
    for index in range(edge * (H // K)):
        b = split_block(index % edge, first, inner, outer)
        hi, cross = _add_outputs(x, index // edge, b, hi, cross, H, E, EP, I, True)
    whole = outer - inner
    for index in range(whole * (H // K)):
        hi, cross = _add_outputs(x, index // whole, inner + index % whole, hi, cross, H, E, EP, I, False)
    value = bf16(two_slices(hi, cross) * (scale_of(top, 2) * 256.0)[:, None])
    value = tl.where((top > 0)[:, None], value, 0)
    tl.store(dv + at[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def _add_outputs(
    x, g, b, high, cross, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, I: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """hi·hi and lo·hi + hi·lo of the codes and dO, with block b of the queries of the group's head g."""
    q, k_tile, s_k, to_code, hi_turned, lo_turned, numbers, token, place, head, j, e, S, P, W, SIZE = x
    i = b * I + tl.arange(0, I)
    at = (place + g) * P + i
    q_tile = tl.trans(rows_of(q, (token + tl.minimum(i, S - 1)) * H + head + g, e, E, EP))
    d_hi = tl.trans(turned_of(hi_turned, place + g, i, e, P, E, EP))
    d_lo = tl.trans(turned_of(lo_turned, place + g, i, e, P, E, EP))
    s_q, peak = tl.load(numbers + Q_SCALE * SIZE + at)[None, :], tl.load(numbers + PEAK * SIZE + at)[None, :]
    inverse, s_d = tl.load(numbers + INVERSE * SIZE + at)[None, :], tl.load(numbers + D_SCALE * SIZE + at)[None, :]
    p = _weights(tl.dot(k_tile, q_tile, out_dtype=tl.int32), s_q, s_k, peak, inverse)
    if MASKED:
        p = tl.where(tl.trans(in_sight(i, j, W)), p, 0.0)
    c_hi, c_lo = slices_of((p * s_d) * to_code)
    cross = tl.dot(c_hi, d_lo, tl.dot(c_lo, d_hi, cross, out_dtype=tl.int32), out_dtype=tl.int32)
    return tl.dot(c_hi, d_hi, high, out_dtype=tl.int32), cross


def attention_backward(
    q: Rows, k: Rows, v: Rows, saved: Attended, d_out: Tensor, shape: AttentionShape, flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq f32[T·H, E], dk f32[T·K, E], dv bf16[T, K·E]) of the dequantised q, k and v, from d_out bf16[T, H·E]."""
    heads, kv_heads, width, sequence, _ = shape
    tokens, length, sizes = len(q.scale) // heads, padded(sequence), common(shape)
    windows = tokens // sequence
    by_query, by_key, size = windows * heads, windows * kv_heads, windows * heads * length
    queries, keys, values = Laid(q, heads, shape, True), Laid(k, kv_heads, shape, True), Laid(v, kv_heads, shape, False)
    numbers = empty((5, windows, heads, length), torch.float32)
    d_hi, d_lo, hi_turned, lo_turned = (empty((by_query, length, width), torch.int8) for _ in range(4))
    launch(
        _prepare, (length // PREPARED, by_query), d_out.contiguous(), saved.out, q.scale.contiguous(), saved.peak,
        saved.total, numbers, d_hi, d_lo, hi_turned, lo_turned, flag, sequence, length, size, H=heads, E=width,
        EP=padded_width(width), LOG_E=ceil_log2(width), B=PREPARED, num_warps=4,
    )  # fmt: skip
    row_top, s_top, p_top = zeros((size,), torch.int32), *zeros((2, by_key * length), torch.int32)
    dq, dk = empty((tokens * heads, width), torch.float32), empty((tokens * kv_heads, width), torch.float32)
    dv = empty((tokens, kv_heads * width), torch.int16)
    of_keys, gradients = (keys.hi, keys.scale, values.hi, values.scale), (d_hi, d_lo, numbers)
    sizes["SIZE"] = size
    launch(
        _maxima, (by_query, length // MAXIMA["J"]), queries.hi, *of_keys, *gradients, row_top, s_top, p_top,
        **sizes, **MAXIMA,
    )  # fmt: skip
    launch(
        _queries, (by_query, length // OF_QUERIES["I"]), queries.hi, keys.hi, keys.turned, *of_keys[1:], *gradients,
        row_top, dq, flag, ROOT=_inverse_root(width), **sizes, **OF_QUERIES,
    )  # fmt: skip
    launch(
        _keys, (by_key, length // OF_KEYS["J"]), queries.hi, queries.turned, *of_keys, *gradients, s_top, dk, flag,
        **sizes, **OF_KEYS,
    )  # fmt: skip
    launch(
        _values, (by_key, length // OF_VALUES["J"]), queries.hi, keys.hi, keys.scale, hi_turned, lo_turned, numbers,
        p_top, dv, flag, **sizes, **OF_VALUES,
    )  # fmt: skip
    return dq, dk, dv


def _inverse_root(width: int) -> float:
    """1 ÷ √E, each rounded to float32."""
    return float(np.float32(1) / np.sqrt(np.float32(width)))
