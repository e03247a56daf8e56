"""The gradients of exact attention, from stored tiles of dS and P·s_dO and the maxima of their rows and columns.

Queries: a block of them against the keys that it sees. Keys and values: a block of them, as rows, against the queries
of all heads of the group that see it; so codes by column are codes of rows, and lie in registers as the product's left
operand. Pairs that do not see each other are 0 in the tiles. Where a maximum was not finite the codes are anything, and
the results 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.nvidia.attention_tiles import TILE, TILE_SIZE, slices_of, tile_number, turned_of, two_slices
from kernels.nvidia.elementary import LN_2
from kernels.nvidia.numbers import bf16, checked_top, inverse_of, scale_of


@triton.jit
def query_gradients(
    tiles, k_turned, k_scale, row_top, dq, flag, S, P, SLOTS, TILES, FIRST, ROOT,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """dq f32[T·H, E] of a block of queries of one head, from dS."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    place = FIRST + tl.program_id(0)
    window, head = place // H, place % H
    kv = window * K + head // (H // K)
    lane, e = tl.arange(0, TILE), tl.arange(0, EP)
    i = block * TILE + lane
    top = checked_top(tl.load(row_top + place * P + i), flag)
    to_code = inverse_of(top, 2)[:, None]
    first = tl.maximum(block + 1 - SLOTS, 0)
    at = tiles + tile_number(tl.program_id(0), block, first, SLOTS, TILES) * TILE_SIZE
    at += lane[None, :] * TILE + lane[:, None]
    hi, lo = tl.zeros((TILE, EP), tl.int32), tl.zeros((TILE, EP), tl.int32)
    for b in range(first, block + 1):
        j = b * TILE + lane
        turned = tl.trans(turned_of(k_turned, kv, j, e, P, E, EP))
        s_k = tl.load(k_scale + kv * P + j)[None, :]
        c_hi, c_lo = slices_of((tl.load(at) * s_k) * to_code)
        hi, lo = tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)
        at += TILE_SIZE
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * ROOT)[:, None], 0.0)
    row = (window * S + tl.minimum(i, S - 1)) * H + head
    tl.store(dq + row[:, None] * E + e[None, :], value, mask=(i < S)[:, None] & (e < E)[None, :])


@triton.jit
def key_gradients(
    tiles, q_turned, q_scale, s_top, dk, flag, S, P, SLOTS, TILES, FIRST,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """dk f32[T·K, E] of a block of keys, from dS."""
    G: tl.constexpr = H // K
    part, block = tl.program_id(0) * G, tl.program_id(1)
    place = FIRST // G + tl.program_id(0)
    lane, e = tl.arange(0, TILE), tl.arange(0, EP)
    j = block * TILE + lane
    top = checked_top(tl.load(s_top + place * P + j), flag)
    to_code = inverse_of(top, 2)[:, None]
    within = lane[:, None] * TILE + lane[None, :]
    hi, lo = tl.zeros((TILE, EP), tl.int32), tl.zeros((TILE, EP), tl.int32)
    count = tl.minimum(tl.cdiv(S, TILE) - block, SLOTS)
    for index in range(count * G):
        g, b = index // count, block + index % count
        i = b * TILE + lane
        turned = tl.trans(turned_of(q_turned, FIRST + part + g, i, e, P, E, EP))
        s_q = tl.load(q_scale + (FIRST + part + g) * P + i)[None, :]
        ds = tl.load(tiles + tile_number(part + g, b, block, SLOTS, TILES) * TILE_SIZE + within)
        c_hi, c_lo = slices_of((ds * s_q) * to_code)
        hi, lo = tl.dot(c_hi, turned, hi, out_dtype=tl.int32), tl.dot(c_lo, turned, lo, out_dtype=tl.int32)
    value = tl.where((top > 0)[:, None], two_slices(hi, lo) * (scale_of(top, 2) * LN_2)[:, None], 0.0)
    row = (place // K * S + tl.minimum(j, S - 1)) * K + place % K
    tl.store(dk + row[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def value_gradients(
    tiles, hi_turned, lo_turned, p_top, dv, S, P, SLOTS, TILES, FIRST,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """dv bf16[T·K, E] of a block of keys, from P·s_dO: hi·hi, and lo·hi + hi·lo, of its codes and dO."""
    G: tl.constexpr = H // K
    part, block = tl.program_id(0) * G, tl.program_id(1)
    place = FIRST // G + tl.program_id(0)
    lane, e = tl.arange(0, TILE), tl.arange(0, EP)
    j = block * TILE + lane
    top = tl.load(p_top + place * P + j)  # finite: P ≤ 1, and dO's rows were checked
    to_code = inverse_of(top, 2)[:, None]
    within = lane[:, None] * TILE + lane[None, :]
    high, cross = tl.zeros((TILE, EP), tl.int32), tl.zeros((TILE, EP), tl.int32)
    count = tl.minimum(tl.cdiv(S, TILE) - block, SLOTS)
    for index in range(count * G):
        g, b = index // count, block + index % count
        i = b * TILE + lane
        d_hi = tl.trans(turned_of(hi_turned, FIRST + part + g, i, e, P, E, EP))
        d_lo = tl.trans(turned_of(lo_turned, FIRST + part + g, i, e, P, E, EP))
        p = tl.load(tiles + tile_number(part + g, b, block, SLOTS, TILES) * TILE_SIZE + within)
        c_hi, c_lo = slices_of(p * to_code)
        cross = tl.dot(c_hi, d_lo, tl.dot(c_lo, d_hi, cross, out_dtype=tl.int32), out_dtype=tl.int32)
        high = tl.dot(c_hi, d_hi, high, out_dtype=tl.int32)
    value = bf16(two_slices(high, cross) * (scale_of(top, 2) * 256.0)[:, None])
    row = (place // K * S + tl.minimum(j, S - 1)) * K + place % K
    tl.store(dv + row[:, None] * E + e[None, :], value, mask=(j < S)[:, None] & (e < E)[None, :])
