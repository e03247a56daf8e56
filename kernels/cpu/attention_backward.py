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

    of_keys = (keys(k.hi), keys(k.scale), keys(v.hi), keys(v.scale))
    return _Inputs(queries(q.hi), queries(q.scale), *of_keys, *(queries(y) for y in by_row))


def _products(a: np.ndarray, right: tuple[np.ndarray, ...], name: str) -> np.ndarray:
    """int32 [len(right), rows of a, rows of right]: a·rᵀ for each, in scratch memory."""
    out = scratch(f"attention {name}", (len(right), len(a), len(right[0])), np.int32)
    for part, r in enumerate(right):
        multiply(a, r.T, out[part])
    return out


def _query_sweep(x: _Inputs, shape: AttentionShape, dq: np.ndarray, flag: np.ndarray) -> None:
    """dQ of one span into dq f32[S, group, E]."""
    group, width = shape.heads // shape.kv_heads, shape.width
    product = scratch("attention product", (2, len(x.q), width), np.int32)
    scale = np.empty(len(x.q), np.float32)
    for block, seen in query_blocks(shape):
        rows = slice(block.start * group, block.stop * group)
        s = _products(x.q[rows], (x.k[seen],), "s")[0]
        dp = scratch("attention dp", (2, *s.shape), np.int32)
        for part, d in enumerate((x.d_hi, x.d_lo)):
            multiply(d[rows], x.v[seen].T, dp[part])
        codes = scratch("attention codes", (2, *s.shape), np.int8)
        kernels.query_gradient_rows(
            s, dp, x.q_scale[rows], x.d_scale[rows], x.delta[rows], x.peak[rows], x.inverse[rows],
            x.k_scale[seen], x.v_scale[seen], block.start, seen.start, group, shape.window, codes, scale[rows], flag,
        )  # fmt: skip
        for part in range(2):
            multiply(codes[part], x.k[seen], product[part, rows])
    kernels.scale_rows(product, scale, np.float32(1) / np.sqrt(np.float32(width)), group, dq)


def _key_sweep(x: _Inputs, shape: AttentionShape, dk: np.ndarray, dv: np.ndarray, flag: np.ndarray) -> None:
    """dK and dV of one span into dk f32[S, E] and dv bf16[S, E]."""
    group = shape.heads // shape.kv_heads
    k_product = scratch("attention product", (2, *x.k.shape), np.int32)
    v_product = scratch("attention v_product", (3, *x.v.shape), np.int32)
    scale = np.empty((2, len(x.k)), np.float32)
    for start in range(0, shape.sequence, KEY_ROWS):
        block = slice(start, min(start + KEY_ROWS, shape.sequence))
        rows = slice(start * group, min(block.stop - 1 + shape.window, shape.sequence) * group)
        s = _products(x.k[block], (x.q[rows],), "s")[0]
        dp = _products(x.v[block], (x.d_hi[rows], x.d_lo[rows]), "dp")
        codes = scratch("attention codes", (4, *s.shape), np.int8)
        kernels.key_gradient_rows(
            s, dp, x.k_scale[block], x.v_scale[block], x.q_scale[rows], x.d_scale[rows], x.delta[rows],
            x.peak[rows], x.inverse[rows], group, shape.window, codes, scale[:, block], flag,
        )  # fmt: skip
        s_hi, s_lo, p_hi, p_lo = codes
        for part, code in enumerate((s_hi, s_lo)):
            multiply(code, x.q[rows], k_product[part, block])
        # The product of the two low slices is dropped.
        for part, (code, d) in enumerate(((p_hi, x.d_hi), (p_hi, x.d_lo), (p_lo, x.d_hi))):
            multiply(code, d[rows], v_product[part, block])
    # s_q holds log₂e/√E; ln 2 brings it back to 1/√E.
    kernels.scale_rows(k_product, scale[0], LN_2, 1, dk[:, None])
    kernels.value_rows(v_product, scale[1], dv)
