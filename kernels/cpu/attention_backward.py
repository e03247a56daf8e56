"""The gradients of exact attention on CPUs, in two sweeps that each recompute the block's scores.

Queries first: a block of queries against all keys that it sees holds whole rows of dS·s_k, so dQ is done at once. Then
keys: a block of keys against all queries that see it holds whole columns of dS·s_q and P·s_dO, lying as rows, so dK and
dV need no column maxima from a sweep before, no transpose and no partial sums.
"""

from typing import NamedTuple

import numpy as np

from kernels.cpu import attention_kernels as kernels
from kernels.cpu.attention import Span, pick, query_blocks, spans
from kernels.cpu.exclusive import exclusive
from kernels.cpu.numeric import LN_2
from kernels.cpu.products import multiply, scratch
from kernels.interface import Attended, AttentionShape, Rows

KEY_ROWS = 128  # keys of a block


class _Inputs(NamedTuple):
    """One span's operands, laid out for the products of both sweeps."""

    q: np.ndarray  # int8 [S·group, E]
    q_columns: np.ndarray  # int8 [E, S·group]
    q_scale: np.ndarray  # f32 [S·group]
    k: np.ndarray  # int8 [S, E]
    k_columns: np.ndarray  # int8 [E, S]
    k_scale: np.ndarray  # f32 [S]
    v: np.ndarray  # int8 [S, E]
    v_columns: np.ndarray  # int8 [E, S]
    v_scale: np.ndarray  # f32 [S]
    d: np.ndarray  # int8 [S·group, 2E], hi then lo
    d_columns: np.ndarray  # int8 [2E, S·group]
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
    d = np.empty((tokens * shape.heads, 2 * shape.width), np.int8)
    d_scale, delta = np.empty(len(d), np.float32), np.empty(len(d), np.float32)
    kernels.prepare_rows(d_out.reshape(d.shape[0], -1), saved.out.reshape(d.shape[0], -1), d, d_scale, delta, flag)
    inverse = np.float32(1) / (saved.total.astype(np.float32) * np.float32(2.0**-18))
    by_row = (d, d_scale, delta, saved.peak.reshape(-1), inverse.reshape(-1))
    for span in spans(tokens, shape):
        x = _inputs(q, k, v, by_row, span, shape)
        _query_sweep(x, shape, dq[span.tokens, span.heads], flag)
        _key_sweep(x, shape, dk[span.tokens, span.kv], dv[span.tokens, span.kv], flag)
    return dq.reshape(-1, shape.width), dk.reshape(-1, shape.width), dv.reshape(tokens, -1)


def _inputs(q: Rows, k: Rows, v: Rows, by_row: tuple[np.ndarray, ...], span: Span, shape: AttentionShape) -> _Inputs:
    def queries(x: np.ndarray) -> np.ndarray:
        return pick(x, shape.heads, span.tokens, span.heads)

    def keys(x: np.ndarray) -> np.ndarray:
        return pick(x, shape.kv_heads, span.tokens, slice(span.kv, span.kv + 1))

    def columns(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.T)

    d, d_scale, delta, peak, inverse = (queries(x) for x in by_row)
    q_hi, k_hi, v_hi = queries(q.hi), keys(k.hi), keys(v.hi)
    return _Inputs(
        *(q_hi, columns(q_hi), queries(q.scale)),
        *(k_hi, columns(k_hi), keys(k.scale)),
        *(v_hi, columns(v_hi), keys(v.scale)),
        *(d, columns(d), d_scale, delta, peak, inverse),
    )


def _query_sweep(x: _Inputs, shape: AttentionShape, dq: np.ndarray, flag: np.ndarray) -> None:
    """dQ of one span into dq f32[S, group, E]."""
    group, width = shape.heads // shape.kv_heads, shape.width
    factor = np.float32(1) / np.sqrt(np.float32(width))
    for block, seen in query_blocks(shape):
        rows = slice(block.start * group, block.stop * group)
        count, keys = rows.stop - rows.start, seen.stop - seen.start
        s = scratch("attention s", (count, keys), np.int32)
        dp = scratch("attention dp", (2 * count, keys), np.int32)
        codes = scratch("attention codes", (2 * count, keys), np.int8)
        product = scratch("attention product", (2 * count, width), np.int32)
        d = scratch("attention d", (2 * count, width), np.int8)
        d[:count], d[count:] = x.d[rows, :width], x.d[rows, width:]
        scale = np.empty(count, np.float32)
        multiply(x.q[rows], x.k_columns[:, seen], s)
        multiply(d, x.v_columns[:, seen], dp)
        kernels.query_gradient_rows(
            s, dp, x.q_scale[rows], x.d_scale[rows], x.delta[rows], x.peak[rows], x.inverse[rows],
            x.k_scale[seen], x.v_scale[seen], block.start, seen.start, group, shape.window, codes, scale, flag,
        )  # fmt: skip
        multiply(codes, x.k[seen], product)
        kernels.scale_rows(product, scale, factor, group, dq[block])


def _key_sweep(x: _Inputs, shape: AttentionShape, dk: np.ndarray, dv: np.ndarray, flag: np.ndarray) -> None:
    """dK and dV of one span into dk f32[S, E] and dv bf16[S, E]."""
    group, width = shape.heads // shape.kv_heads, shape.width
    for start in range(0, shape.sequence, KEY_ROWS):
        block = slice(start, min(start + KEY_ROWS, shape.sequence))
        rows = slice(start * group, min(block.stop - 1 + shape.window, shape.sequence) * group)
        count, n = block.stop - start, rows.stop - rows.start
        s, hi, lo = (scratch(f"attention {name}", (count, n), np.int32) for name in ("s", "dp", "dp_lo"))
        codes = scratch("attention codes", (4 * count, n), np.int8)
        k_product = scratch("attention product", (2 * count, width), np.int32)
        v_product = scratch("attention v_product", (2 * count, 2 * width), np.int32)
        scale = np.empty(2 * count, np.float32)
        multiply(x.k[block], x.q_columns[:, rows], s)
        multiply(x.v[block], x.d_columns[:width, rows], hi)
        multiply(x.v[block], x.d_columns[width:, rows], lo)
        kernels.key_gradient_rows(
            s, hi, lo, x.k_scale[block], x.v_scale[block], x.q_scale[rows], x.d_scale[rows], x.delta[rows],
            x.peak[rows], x.inverse[rows], group, shape.window, codes, scale, flag,
        )  # fmt: skip
        multiply(codes[: 2 * count], x.q[rows], k_product)
        multiply(codes[2 * count :], x.d[rows], v_product)
        # s_q holds log₂e/√E; ln 2 brings it back to 1/√E.
        kernels.scale_rows(k_product, scale[:count], LN_2, 1, dk[block][:, None])
        kernels.value_rows(v_product, scale[count:], dv[block])
