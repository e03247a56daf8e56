"""Exact attention: causal, grouped heads, full or windowed. Definition: kernels/reference/attention.py.

A program takes a block of queries of one head and goes twice over the keys that any of them sees: first for the row
maxima, then for the probabilities, their sum and P·V. Nothing is rescaled, and every sum is one of integers. Blocks of
keys that all of its queries see whole come without masks; of a local layer only its band is visited.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import Attended, AttentionShape, Rows
from kernels.nvidia.attention_tiles import (
    COUNT_UNIT,
    Laid,
    common,
    in_sight,
    keys_in_reach,
    rows_of,
    scores,
    slices_of,
    split_block,
    turned_of,
    two_slices,
)
from kernels.nvidia.elementary import exp2_down
from kernels.nvidia.numbers import UNIT_2, bf16, bits, bits_of, empty, inverse_of, launch

QUERIES, KEYS, WARPS, STAGES = 64, 64, 4, 3
COUNT = tl.constexpr(1.5 * 2.0**5)  # p + it counts in units of COUNT_UNIT
COUNT_BITS = tl.constexpr(bits_of(1.5 * 2.0**5))


@triton.jit
def _peaks(x, b, m, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BJ: tl.constexpr, MASKED: tl.constexpr):
    """The running maxima m of the scores, with block b of the keys.

    A score is finite, and −0 only where it underflows, which the product of two live scales is too large for: so the
    float maximum is the maximum by bits.
    """
    q, q_scale, i, e, k, k_scale, place, row, S, P, W = x
    j = b * BJ + tl.arange(0, BJ)
    k_tile = rows_of(k, row + tl.minimum(j, S - 1) * K, e, E, EP)
    s = scores(q, k_tile, q_scale, tl.load(k_scale + place * P + j))
    if MASKED:
        s = tl.where(in_sight(i, j, W), s, float("-inf"))
    return tl.maximum(m, tl.max(s, 1))


@triton.jit
def _weigh(
    x, v_turned, v_scale, b, m, inverse, total, hi, lo,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BJ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums so far with block b of the keys: of rint(p·2¹⁸) and of the codes' two slices times v."""
    q, q_scale, i, e, k, k_scale, place, row, S, P, W = x
    j = b * BJ + tl.arange(0, BJ)
    k_tile = rows_of(k, row + tl.minimum(j, S - 1) * K, e, E, EP)
    v_tile = turned_of(v_turned, place, j, e, P, E, EP)
    p = exp2_down(scores(q, k_tile, q_scale, tl.load(k_scale + place * P + j)) - m[:, None])
    if MASKED:
        p = tl.where(in_sight(i, j, W), p, 0.0)
    total += tl.sum(bits(p + COUNT) - COUNT_BITS, 1)
    c_hi, c_lo = slices_of((p * tl.load(v_scale + place * P + j)[None, :]) * inverse[:, None])
    v_tile = tl.trans(v_tile)
    return total, tl.dot(c_hi, v_tile, hi, out_dtype=tl.int32), tl.dot(c_lo, v_tile, lo, out_dtype=tl.int32)


@triton.jit
def _attend(
    q, q_scale, k, k_scale, v_turned, v_scale, v_top, out, peak, total_out, S, P, W,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """out bf16[T·H, E], peak f32[T·H] and total int32[T·H] of BI queries of one head."""
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BI  # the longest rows first
    window, head = tl.program_id(0) // H, tl.program_id(0) % H
    kv = head // (H // K)
    place = window * K + kv
    i, e = start + tl.arange(0, BI), tl.arange(0, EP)
    at = (window * S + tl.minimum(i, S - 1)) * H + head
    q_tile, s_q = rows_of(q, at, e, E, EP), tl.load(q_scale + at)
    x = (q_tile, s_q, i, e, k, k_scale, place, window * S * K + kv, S, P, W)
    first, inner, outer, last = keys_in_reach(start, S, W, BI, BJ)
    edge = inner - first + tl.maximum(last - outer, 0)

    m = tl.full((BI,), float("-inf"), tl.float32)
    for b in range(edge):
        m = _peaks(x, split_block(b, first, inner, outer), m, K, E, EP, BJ, True)
    for b in range(inner, outer):
        m = _peaks(x, b, m, K, E, EP, BJ, False)

    top = tl.load(v_top + place * P + i)
    inverse = inverse_of(bits(top), 2)
    total = tl.zeros((BI,), tl.int32)
    hi, lo = tl.zeros((BI, EP), tl.int32), tl.zeros((BI, EP), tl.int32)
    for index in range(edge):
        b = split_block(index, first, inner, outer)
        total, hi, lo = _weigh(x, v_turned, v_scale, b, m, inverse, total, hi, lo, K, E, EP, BJ, True)
    for b in range(inner, outer):
        total, hi, lo = _weigh(x, v_turned, v_scale, b, m, inverse, total, hi, lo, K, E, EP, BJ, False)

    factor = tl.div_rn(top * UNIT_2, total.to(tl.float32) * COUNT_UNIT)
    to = out + at[:, None] * E + e[None, :]
    tl.store(to, bf16(two_slices(hi, lo) * factor[:, None]), mask=(i < S)[:, None] & (e < E)[None, :])
    tl.store(peak + at, m, mask=i < S)
    tl.store(total_out + at, total, mask=i < S)


def attention(q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
    """Attention of quantised rows q[T·H, E], k and v[T·K, E]; windows of a unit do not see each other.

    It needs no flag: q and k are normalised rows, so every score is finite.
    """
    tokens = len(q.scale) // shape.heads
    out = empty((tokens, shape.heads * shape.width), torch.int16)
    peak, total = (empty((tokens, shape.heads), dtype) for dtype in (torch.float32, torch.int32))
    keys, values = (Laid(x, shape.kv_heads, shape, turn) for x, turn in ((k, False), (v, True)))
    grid = (tokens // shape.sequence * shape.heads, triton.cdiv(shape.sequence, QUERIES))
    launch(
        _attend, grid, q.hi.contiguous(), q.scale.contiguous(), keys.hi, keys.scale, values.turned, values.scale,
        values.top, out, peak, total, **common(shape), BI=QUERIES, BJ=KEYS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return Attended(out, peak, total)
