"""The gradients of exact attention on CPUs, in two sweeps that each recompute the block's scores.

Queries first: a block of queries against all keys that it sees holds whole rows of dS·s_k, so dQ is done at once. Then
keys: a block of keys against all queries that see it holds whole columns of dS·s_q and P·s_dO, lying as rows, so dK and
dV need no column maxima from a sweep before, no transpose and no partial sums. A block is one thread's work.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernels.cpu import attention_kernels as kernels
from kernels.cpu.attention import BLOCK_PAIRS, SHORTEST, Span, pick, query_blocks, spans
from kernels.cpu.exclusive import exclusive
from kernels.cpu.numeric import LN_2
from kernels.cpu.pool import spread
from kernels.cpu.products import multiply, scratch
from kernels.interface import Attended, AttentionShape, Rows

MOST_KEYS = 256  # keys of a block


class _Inputs(NamedTuple):
    """One span's operands, laid out for the products of both sweeps."""

    q: np.ndarray  # int8 [S·group, E]
    q_scale: np.ndarray  # f32 [S·group]
    k: np.ndarray  # int8 [S, E]
    k_scale: np.ndarray  # f32 [S]
    v: np.ndarray  # int8 [S, E]
    v_scale: np.ndarray  # f32 [S]
    d_hi: np.ndarray  # int8 [S·group, E]
    d_lo: np.ndarray  # int8 [S·group, E]
    d_scale: np.ndarray  # f32 [S·group]
    delta: np.ndarray  # f32 [S·group], Σ dO·O
    peak: np.ndarray  # f32 [S·group]
    inverse: np.ndarray  # f32 [S·group], 1 ÷ the row's sum


@exclusive
def attention_backward(
    q: Rows, k: Rows, v: Rows, saved: Attended, d_out: np.ndarray, shape: AttentionShape, flag: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq f32[T·H, E], dk f32[T·K, E], dv bf16[T, K·E]) of the dequantised q, k and v, from d_out bf16[T, H·E].

    The flag is raised by an output gradient, or a row or column of dS or P·s_dO, that is not finite; its codes are 0.
    """
    tokens = len(q.scale) // shape.heads
    dq = np.empty((tokens, shape.heads, shape.width), np.float32)
    dk = np.empty((tokens, shape.kv_heads, shape.width), np.float32)
    dv = np.empty((tokens, shape.kv_heads, shape.width), np.uint16)
    rows = (tokens * shape.heads, shape.width)
    d_hi, d_lo = np.empty(rows, np.int8), np.empty(rows, np.int8)
    d_scale, delta = np.empty(len(d_hi), np.float32), np.empty(len(d_hi), np.float32)
    kernels.prepare_rows(d_out.reshape(rows), saved.out.reshape(rows), d_hi, d_lo, d_scale, delta, flag)
    inverse = np.float32(1) / (saved.total.astype(np.float32) * np.float32(2.0**-18))
    by_row = (d_hi, d_lo, d_scale, delta, saved.peak.reshape(-1), inverse.reshape(-1))
    by_queries, by_keys = [], []
    for span in spans(tokens, shape):
        x = _inputs(q, k, v, by_row, span, shape)
        of_queries, of_keys, of_values = dq[span.tokens, span.heads], dk[span.tokens, span.kv], dv[span.tokens, span.kv]
        by_queries += [(x, shape, block, seen, of_queries[block], flag) for block, seen in query_blocks(shape)]
        by_keys += [
            (x, shape, block, rows, of_keys[block], of_values[block], flag) for block, rows in key_blocks(shape)
        ]
    spread(_query_gradients, by_queries)
    spread(_key_gradients, by_keys)
    return dq.reshape(-1, shape.width), dk.reshape(-1, shape.width), dv.reshape(tokens, -1)


def _inputs(q: Rows, k: Rows, v: Rows, by_row: tuple[np.ndarray, ...], span: Span, shape: AttentionShape) -> _Inputs:
    def queries(x: np.ndarray) -> np.ndarray:
        return pick(x, shape.heads, span.tokens, span.heads)

    def keys(x: np.ndarray) -> np.ndarray:
        return pick(x, shape.kv_heads, span.tokens, slice(span.kv, span.kv + 1))

    of_keys = (keys(k.hi), keys(k.scale), keys(v.hi), keys(v.scale))
    return _Inputs(queries(q.hi), queries(q.scale), *of_keys, *(queries(y) for y in by_row))


def key_blocks(shape: AttentionShape) -> Iterator[tuple[slice, slice]]:
    """(keys, rows of the queries, by (query, head of the group), that see any of them), the longest first."""
    group, start = shape.heads // shape.kv_heads, 0
    while start < shape.sequence:
        seeing = min(shape.window, shape.sequence - start) * group
        stop = min(shape.sequence, start + max(SHORTEST, min(MOST_KEYS, BLOCK_PAIRS // seeing)))
        yield slice(start, stop), slice(start * group, min(stop - 1 + shape.window, shape.sequence) * group)
        start = stop


def _query_gradients(
    x: _Inputs, shape: AttentionShape, block: slice, seen: slice, dq: np.ndarray, flag: np.ndarray
) -> None:
    """dQ of one block of queries, f32[B, group, E]."""
    group, width = shape.heads // shape.kv_heads, shape.width
    rows = slice(block.start * group, block.stop * group)
    count = rows.stop - rows.start
    s = multiply(x.q[rows], x.k[seen].T, scratch("attention s", (count, seen.stop - seen.start), np.int32))
    dp = scratch("attention dp", (2, *s.shape), np.int32)
    for part, d in enumerate((x.d_hi, x.d_lo)):
        multiply(d[rows], x.v[seen].T, dp[part])
    codes, scale = scratch("attention codes", (2, *s.shape), np.int8), np.empty(count, np.float32)
    kernels.query_gradient_rows(
        s, dp, x.q_scale[rows], x.d_scale[rows], x.delta[rows], x.peak[rows], x.inverse[rows],
        x.k_scale[seen], x.v_scale[seen], block.start, seen.start, group, shape.window, codes, scale, flag,
    )  # fmt: skip
    flat = codes.reshape(2 * count, -1)
    product = multiply(flat, x.k[seen], scratch("attention product", (2 * count, width), np.int32))
    factor = np.float32(1) / np.sqrt(np.float32(width))
    kernels.scale_rows(product.reshape(2, count, width), scale, factor, group, dq)


def _key_gradients(
    x: _Inputs,
    shape: AttentionShape,
    block: slice,
    rows: slice,
    dk: np.ndarray,
    dv: np.ndarray,
    flag: np.ndarray,
) -> None:
    """dK f32[B, E] and dV bf16[B, E] of one block of keys."""
    group, width, count = shape.heads // shape.kv_heads, shape.width, block.stop - block.start
    s = multiply(x.k[block], x.q[rows].T, scratch("attention s", (count, rows.stop - rows.start), np.int32))
    dp = scratch("attention dp", (2, *s.shape), np.int32)
    for part, d in enumerate((x.d_hi, x.d_lo)):
        multiply(x.v[block], d[rows].T, dp[part])
    codes, scale = scratch("attention codes", (4, *s.shape), np.int8), np.empty((2, count), np.float32)
    kernels.key_gradient_rows(
        s, dp, x.k_scale[block], x.v_scale[block], x.q_scale[rows], x.d_scale[rows], x.delta[rows],
        x.peak[rows], x.inverse[rows], group, shape.window, codes, scale, flag,
    )  # fmt: skip
    of_s, of_p = codes.reshape(2, 2 * count, -1)
    product = scratch("attention product", (3 * count, width), np.int32)
    multiply(of_s, x.q[rows], product[: 2 * count])
    # s_q holds log₂e/√E; ln 2 brings it back to 1/√E.
    kernels.scale_rows(product[: 2 * count].reshape(2, count, width), scale[0], LN_2, 1, dk[:, None])
    multiply(of_p, x.d_hi[rows], product[: 2 * count])
    multiply(of_p[:count], x.d_lo[rows], product[2 * count :])  # the product of the two low slices is dropped
    kernels.value_rows(product.reshape(3, count, width), scale[1], dv)
