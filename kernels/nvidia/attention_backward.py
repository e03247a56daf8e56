"""The gradients of exact attention. Definition: kernels/reference/attention.py.

Four sweeps over the same band. The first stores dS and P·s_dO, 8 bytes a pair, which the others only read:

    pairs    a block of keys against all queries that see it: row maxima of dS·s_k, column maxima of dS·s_q and P·s_dO
    dQ       a block of queries against the keys that it sees
    dK, dV   a block of keys, as rows, against the queries of all heads of the group that see it

Rows or columns whose maximum is not finite raise the flag; whatever their codes are, their results are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Attended, AttentionShape, Rows
from kernels.nvidia.attention_gradients import key_gradients, query_gradients, value_gradients
from kernels.nvidia.attention_tiles import (
    COUNT_UNIT,
    TILE,
    TILE_SIZE,
    Laid,
    common,
    in_sight,
    numbers_of,
    padded,
    padded_width,
    queries_in_reach,
    rows_of,
    score_gradient,
    split_block,
    stored_tiles,
    tile_number,
    weights,
)
from kernels.nvidia.numbers import (
    ceil_log2,
    checked_top,
    code_of,
    empty,
    f32_of_bf16,
    fixed_sum_rows,
    high_of,
    inverse_of,
    inverse_root,
    launch,
    low_of,
    magnitude,
    scale_of,
    zeros,
)

PAIRS = {"num_warps": 4, "num_stages": 3}
OF_QUERIES = {"num_warps": 4, "num_stages": 4}
OF_KEYS = {"num_warps": 4, "num_stages": 4}
OF_VALUES = {"num_warps": 4, "num_stages": 3}
STORED = 6 * 2**30  # bytes of tiles at a time, beyond which heads follow one another; at least one group of heads
PREPARED = 32  # tokens of a block of the preparation


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
    counted = tl.load(total + row, mask=inside, other=1).to(tl.float32) * COUNT_UNIT
    tl.store(numbers + to, tl.load(q_scale + row, mask=inside, other=0.0))
    tl.store(numbers + SIZE + to, tl.load(peak + row, mask=inside, other=0.0))
    tl.store(numbers + 2 * SIZE + to, tl.where(inside, tl.div_rn(1.0, counted), 0.0))
    tl.store(numbers + 3 * SIZE + to, scale_of(top, 2))
    tl.store(numbers + 4 * SIZE + to, fixed_sum_rows(d * o, LOG_E, flag))


@triton.jit
def _pairs(
    q, k, k_scale, v, v_scale, d_hi, d_lo, numbers, row_top, s_top, p_top, ds_tiles, p_tiles, S, P, W, SIZE, SLOTS,
    TILES, FIRST, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """A block of keys against one head's queries: tiles [keys, queries] of dS and P·s_dO; bits of the largest |dS·s_k|
    of each query, |dS·s_q| and P·s_dO of each key, i32 [N, ·, P], from zeros."""
    part, block, place = tl.program_id(0), tl.program_id(1), FIRST + tl.program_id(0)
    window, head = place // H, place % H
    kv = place // (H // K)
    lane, e = tl.arange(0, TILE), tl.arange(0, EP)
    j = block * TILE + lane
    at = (window * S + tl.minimum(j, S - 1)) * K + head // (H // K)
    k_tile, v_tile = tl.trans(rows_of(k, at, e, E, EP)), tl.trans(rows_of(v, at, e, E, EP))
    s_k, s_v = tl.load(k_scale + kv * P + j)[None, :], tl.load(v_scale + kv * P + j)[None, :]
    q += (window * S * H + head) * E
    d_hi, d_lo = d_hi + place * P * E, d_lo + place * P * E
    x = (q, k_tile, v_tile, s_k, s_v, d_hi, d_lo, numbers + place * P, row_top + place * P)
    y = (lane, e, j, S, W, SIZE, ds_tiles, p_tiles, part, block, SLOTS, TILES)
    first, inner, outer, last = queries_in_reach(block * TILE, S, W, TILE, TILE)
    of_s, of_p = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    for index in range(inner - first + tl.maximum(last - outer, 0)):
        of_s, of_p = _meet(x, y, split_block(index, first, inner, outer), of_s, of_p, H, E, EP, True)
    for b in range(inner, outer):
        of_s, of_p = _meet(x, y, b, of_s, of_p, H, E, EP, False)
    tl.atomic_max(s_top + kv * P + j, tl.max(magnitude(of_s), 0), sem="relaxed")
    tl.atomic_max(p_top + kv * P + j, tl.max(magnitude(of_p), 0), sem="relaxed")


@triton.jit
def _meet(x, y, b, of_s, of_p, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr):
    """Block b of the queries: stores its tiles and row maxima; returns the tiles of running maxima."""
    q, k_tile, v_tile, s_k, s_v, d_hi, d_lo, numbers, row_top = x
    lane, e, j, S, W, SIZE, ds_tiles, p_tiles, part, block, SLOTS, TILES = y
    start = b * TILE  # scalar offsets first: what is left of a tile's addresses is the same in every turn
    own = tl.minimum(lane, S - 1 - start) if MASKED else lane
    q_tile = rows_of(q + start * (H * E), own * H, e, E, EP)
    hi_tile, lo_tile = rows_of(d_hi + start * E, lane, e, E, EP), rows_of(d_lo + start * E, lane, e, E, EP)
    s_q, peak, inverse, s_d, delta = numbers_of(numbers + start, lane, SIZE)
    product = tl.dot(q_tile, k_tile, out_dtype=tl.int32)
    hi, lo = tl.dot(hi_tile, v_tile, out_dtype=tl.int32), tl.dot(lo_tile, v_tile, out_dtype=tl.int32)
    p = weights(product, s_q[:, None], s_k, peak[:, None], inverse[:, None])
    ds = score_gradient(p, hi, lo, s_d[:, None], s_v, delta[:, None])
    p *= s_d[:, None]
    if MASKED:
        seen = in_sight(start + lane, j, W)
        p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
    to, within = tile_number(part, b, block, SLOTS, TILES) * TILE_SIZE, lane[None, :] * TILE + lane[:, None]
    tl.store(p_tiles + to + within, p)
    tl.store(ds_tiles + to + within, ds)
    tl.atomic_max(row_top + start + lane, tl.max(magnitude(ds * s_k), 1), sem="relaxed")
    of_s = tl.maximum(of_s, tl.abs(ds * s_q[:, None]), propagate_nan=tl.PropagateNan.ALL)
    return of_s, tl.maximum(of_p, p)  # P·s_dO is finite, and not below 0


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
    window, blocks, slots, tiles = sizes.pop("W"), triton.cdiv(sequence, TILE.value), *stored_tiles(shape)
    step = max(1, STORED // (8 * TILE_SIZE.value * tiles * (heads // kv_heads))) * (heads // kv_heads)
    of_ds, of_p = (empty((min(step, by_query) * tiles, TILE.value, TILE.value), torch.float32) for _ in range(2))
    for first in range(0, by_query, step):
        count = min(step, by_query - first)
        place = {"SLOTS": slots, "TILES": tiles, "FIRST": first, **sizes}
        launch(
            _pairs, (count, blocks), queries.hi, keys.hi, keys.scale, values.hi, values.scale, d_hi, d_lo, numbers,
            row_top, s_top, p_top, of_ds, of_p, W=window, SIZE=size, **place, **PAIRS,
        )  # fmt: skip
        launch(
            query_gradients, (count, blocks), of_ds, keys.turned, keys.scale, row_top, dq, flag,
            ROOT=inverse_root(width), **place, **OF_QUERIES,
        )  # fmt: skip
        by_group = (count // (heads // kv_heads), blocks)
        launch(key_gradients, by_group, of_ds, queries.turned, queries.scale, s_top, dk, flag, **place, **OF_KEYS)
        launch(value_gradients, by_group, of_p, hi_turned, lo_turned, p_top, dv, **place, **OF_VALUES)
    return dq, dk, dv
