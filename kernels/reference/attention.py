"""Exact attention: causal, grouped heads, full or windowed, forward and backward.

Scores are integer products in bits of exponent: S = f32(q·k)·s_q·s_k. Every maximum is taken over the whole row before
anything is summed, so nothing is ever rescaled: P = exp2(S − max), the row's sum counts rint(P·2¹⁸), and P·V is an
integer product. This reference holds one window's scores at a time.
"""

import numpy as np

from kernels.interface import INT16_MAX, Attended, AttentionShape, Rows
from kernels.reference.constants import LN_2
from kernels.reference.elementary import exp2
from kernels.reference.numbers import F32, bf16, f32, fixed_sum
from kernels.reference.products import integer_product, value
from kernels.reference.quantise import quantise, scale_and_inverse, split

UNIT = F32(1) / F32(INT16_MAX)


def attention(q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
    """Attention of quantised rows q[T·H, E], k and v[T·K, E]; windows of a unit do not see each other.

    It needs no flag: q and k are normalised rows, so every score is finite.
    """
    tokens = len(q.scale) // shape.heads
    out = np.empty((tokens, shape.heads, shape.width), np.uint16)
    peak = np.empty((tokens, shape.heads), np.float32)
    total = np.empty((tokens, shape.heads), np.int32)
    for span, head, kv in _heads(tokens, shape):
        q_h = _take(q, span, head, shape.heads)
        k_h, v_h = (_take(rows, span, kv, shape.kv_heads) for rows in (k, v))
        seen = visible(shape)
        s = _scores(q_h, k_h)
        m = np.max(np.where(seen, s, F32(-np.inf)), axis=1)
        p = np.where(seen, exp2(np.minimum(s - m[:, None], F32(0))), F32(0))
        count = np.sum(np.rint(p * F32(2.0**18)).astype(np.int32), axis=1, dtype=np.int32)
        top = np.max(np.where(seen, v_h.scale[None, :], F32(0)), axis=1)
        _, inverse = scale_and_inverse(top, 2)
        hi, lo = split((p * v_h.scale[None, :]) * inverse[:, None], np.ones((1, 1), np.float32), 2)
        factor = (top * UNIT) / (count.astype(np.float32) * F32(2.0**-18))
        out[span, head] = bf16(value(hi, lo, np.ascontiguousarray(v_h.hi.T)) * factor[:, None])
        peak[span, head], total[span, head] = m, count
    return Attended(out.reshape(tokens, -1), peak, total)


def attention_backward(
    q: Rows, k: Rows, v: Rows, saved: Attended, d_out: np.ndarray, shape: AttentionShape, flag: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq f32[T·H, E], dk f32[T·K, E], dv bf16[T, K·E]) of the dequantised q, k and v, from d_out bf16[T, H·E].

    dS = P·(dP − Σ dO·O), 0 where a key is not seen. dQ contracts dS·s_k, quantised by row; dK contracts dS·s_q and dV
    contracts P·s_dO, both quantised by column over all queries of the group.
    """
    tokens = len(q.scale) // shape.heads
    dq = np.empty((tokens, shape.heads, shape.width), np.float32)
    dk = np.empty((tokens, shape.kv_heads, shape.width), np.float32)
    dv = np.empty((tokens, shape.kv_heads, shape.width), np.uint16)
    d = quantise(f32(d_out).reshape(-1, shape.width), 2, flag)
    delta = fixed_sum((f32(d_out) * f32(saved.out)).reshape(-1, shape.width), flag).reshape(tokens, shape.heads)
    group = shape.heads // shape.kv_heads
    for start in range(0, tokens, shape.sequence):
        span = slice(start, start + shape.sequence)
        for kv in range(shape.kv_heads):
            k_h, v_h = _take(k, span, kv, shape.kv_heads), _take(v, span, kv, shape.kv_heads)
            ds_all, p_all, q_all, d_all = [], [], [], []
            for head in range(kv * group, (kv + 1) * group):
                q_h, d_h = _take(q, span, head, shape.heads), _take(d, span, head, shape.heads)
                p = _probabilities(q_h, k_h, saved.peak[span, head], saved.total[span, head], shape)
                dp = (value(d_h.hi, d_h.lo, v_h.hi) * d_h.scale[:, None]) * v_h.scale[None, :]
                ds = np.where(visible(shape), p * (dp - delta[span, head][:, None]), F32(0))
                dq[span, head] = _query_gradient(ds, k_h, shape.width, flag)
                ds_all.append(ds * q_h.scale[:, None])
                p_all.append(p * d_h.scale[:, None])
                q_all.append(q_h.hi)
                d_all.append(d_h)
            dk[span, kv] = _key_gradient(np.concatenate(ds_all), np.concatenate(q_all), flag)
            dv[span, kv] = _value_gradient(np.concatenate(p_all), d_all, flag)
    return dq.reshape(-1, shape.width), dk.reshape(-1, shape.width), dv.reshape(tokens, -1)


def visible(shape: AttentionShape) -> np.ndarray:
    """Which keys each query of a window sees: bool[sequence, sequence]."""
    distance = np.arange(shape.sequence)[:, None] - np.arange(shape.sequence)[None, :]
    return (distance >= 0) & (distance < shape.window)


def _heads(tokens: int, shape: AttentionShape) -> list[tuple[slice, int, int]]:
    group = shape.heads // shape.kv_heads
    starts = range(0, tokens, shape.sequence)
    return [(slice(s, s + shape.sequence), h, h // group) for s in starts for h in range(shape.heads)]


def _take(rows: Rows, span: slice, head: int, heads: int) -> Rows:
    """One head's rows of one window."""
    pick = slice(span.start * heads + head, span.stop * heads, heads)
    return Rows(rows.hi[pick], None if rows.lo is None else rows.lo[pick], rows.scale[pick])


def _scores(q: Rows, k: Rows) -> np.ndarray:
    return (integer_product(q.hi, k.hi).astype(np.float32) * q.scale[:, None]) * k.scale[None, :]


def _probabilities(q: Rows, k: Rows, peak: np.ndarray, total: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """P = exp2(S − peak) · (1 ÷ total), 0 where a key is not seen."""
    p = exp2(np.minimum(_scores(q, k) - peak[:, None], F32(0)))
    inverse = F32(1) / (total.astype(np.float32) * F32(2.0**-18))
    return np.where(visible(shape), p * inverse[:, None], F32(0))


def _query_gradient(ds: np.ndarray, k: Rows, width: int, flag: np.ndarray) -> np.ndarray:
    left = quantise(ds * k.scale[None, :], 2, flag)
    factor = left.scale * (F32(1) / np.sqrt(F32(width)))
    return value(left.hi, left.lo, np.ascontiguousarray(k.hi.T)) * factor[:, None]


def _key_gradient(left: np.ndarray, queries: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """Contracts the columns of dS·s_q; s_q holds log₂e/√E, so ln 2 brings it back to 1/√E."""
    columns = quantise(np.ascontiguousarray(left.T), 2, flag)
    return value(columns.hi, columns.lo, np.ascontiguousarray(queries.T)) * (columns.scale * LN_2)[:, None]


def _value_gradient(left: np.ndarray, d_rows: list[Rows], flag: np.ndarray) -> np.ndarray:
    """Contracts the columns of P·s_dO with both slices of dO; the product of the two low slices is dropped."""
    columns = quantise(np.ascontiguousarray(left.T), 2, flag)
    d_hi = np.ascontiguousarray(np.concatenate([d.hi for d in d_rows]).T)
    d_lo = np.ascontiguousarray(np.concatenate([d.lo for d in d_rows]).T)
    cross = integer_product(columns.hi, d_lo) + integer_product(columns.lo, d_hi)
    both = integer_product(columns.hi, d_hi).astype(np.float32) * F32(256) + cross.astype(np.float32)
    return bf16(both * (columns.scale * F32(256))[:, None])
