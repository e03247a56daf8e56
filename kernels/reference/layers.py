"""Row-wise operations of the block: embedding, RMSNorm, rotary QK-norm, SwiGLU, forward and backward."""

import numpy as np

from kernels.interface import GRADIENT_BITS, SUM_LIMIT, Rope, Rows
from kernels.reference.constants import LOG2_E
from kernels.reference.elementary import sigmoid
from kernels.reference.numbers import F32, bf16, f32, fixed_point, fixed_sum
from kernels.reference.quantise import quantise


def embed(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows of the table f32[V, D] as bf16[T, D]."""
    return bf16(table[tokens])


def embed_backward(dx: np.ndarray, tokens: np.ndarray, sums: np.ndarray, flag: np.ndarray) -> None:
    """sums[token] += rint(dx · 2²⁴) for dx bf16[T, D]."""
    np.add.at(sums, tokens, fixed_point(f32(dx), GRADIENT_BITS, flag, len(tokens), SUM_LIMIT))


def inverse_rms(x: np.ndarray, eps: np.float32, flag: np.ndarray) -> np.ndarray:
    """1 ÷ √(mean x² + eps) of each row, f32[R]."""
    mean = fixed_sum(x * x, flag) * (F32(1) / F32(x.shape[1]))
    return F32(1) / np.sqrt(mean + eps)


def norm_rows(
    x: np.ndarray, gain: np.ndarray, eps: np.float32, slices: int, flag: np.ndarray
) -> tuple[Rows, np.ndarray]:
    """RMSNorm with a gain, quantised by token: the rows, and the inverse root mean squares for the backward."""
    values = f32(x)
    r = inverse_rms(values, eps, flag)
    return quantise((values * r[:, None]) * gain[None, :], slices, flag), r


def norm_bf16(x: np.ndarray, gain: np.ndarray, eps: np.float32, flag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RMSNorm with a gain, kept as bf16[T, D]: the residual stream's first value; and the inverse root mean squares."""
    values = f32(x)
    r = inverse_rms(values, eps, flag)
    return bf16((values * r[:, None]) * gain[None, :]), r


def norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    r: np.ndarray,
    gain: np.ndarray,
    residual: np.ndarray | None,
    sums: np.ndarray,
    flag: np.ndarray,
) -> np.ndarray:
    """residual + dX of Y = x·r·gain, as bf16[T, D]; sums i64[D] gain rint(dY·x·r·2²⁴).

    dX = (g − n·mean(n·g))·r with n = x·r, g = dY·gain.
    """
    dy_values = f32(dy)
    n = f32(x) * r[:, None]
    dx = _through_norm(dy_values * gain[None, :], n, r, flag)
    sums += np.sum(fixed_point(dy_values * n, GRADIENT_BITS, flag, len(dy), SUM_LIMIT), axis=0, dtype=np.int64)
    return bf16(dx) if residual is None else bf16(f32(residual) + dx)


def _through_norm(g: np.ndarray, n: np.ndarray, r: np.ndarray, flag: np.ndarray) -> np.ndarray:
    mean = fixed_sum(n * g, flag) * (F32(1) / F32(n.shape[1]))
    return (g - n * mean[:, None]) * r[:, None]


def rotate_rows(y: np.ndarray, rope: Rope, eps: np.float32, query: bool, flag: np.ndarray) -> Rows:
    """Gain-free QK-norm per head, then rotation of the pairs (even, odd), then one slice per (token, head).

    A query's scale also takes log₂e/√E, so that scores come out in bits of exponent.
    """
    width = 2 * rope.cos.shape[1]
    heads = f32(y).reshape(-1, width)
    n = heads * inverse_rms(heads, eps, flag)[:, None]
    cos, sin = _tables(rope, len(y), heads.shape[0])
    even, odd = n[:, 0::2], n[:, 1::2]
    z = np.empty_like(n)
    z[:, 0::2] = even * cos - odd * sin
    z[:, 1::2] = even * sin + odd * cos
    rows = quantise(z, 1, flag)
    return rows._replace(scale=rows.scale * query_factor(width)) if query else rows


def rotate_backward(dz: np.ndarray, y: np.ndarray, rope: Rope, eps: np.float32, flag: np.ndarray) -> np.ndarray:
    """The gradient of rotate_rows' input, bf16[T, H·E], from dz f32[T·H, E]."""
    width = 2 * rope.cos.shape[1]
    heads = f32(y).reshape(-1, width)
    r = inverse_rms(heads, eps, flag)
    cos, sin = _tables(rope, len(y), heads.shape[0])
    even, odd = dz[:, 0::2], dz[:, 1::2]
    g = np.empty_like(dz)
    g[:, 0::2] = even * cos + odd * sin
    g[:, 1::2] = odd * cos - even * sin
    return bf16(_through_norm(g, heads * r[:, None], r, flag)).reshape(y.shape)


def query_factor(width: int) -> np.float32:
    """log₂e · (1 ÷ √E)."""
    return LOG2_E * (F32(1) / np.sqrt(F32(width)))


def _tables(rope: Rope, tokens: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    sequence = rope.cos.shape[0]
    position = (np.arange(rows) // (rows // tokens)) % sequence
    return rope.cos[position], rope.sin[position]


def swiglu_rows(gate_up: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """(gate·sigmoid(gate))·up, quantised by token; gate is the first half of each row."""
    gate, up = np.split(f32(gate_up), 2, axis=1)
    return quantise((gate * sigmoid(gate)) * up, slices, flag)


def swiglu_backward(dh: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """bf16[T, 2F] in gate_up's place, from dh: d_gate = (dh·up)·(s·(1 + gate·(1 − s))), d_up = dh·(gate·s)."""
    gate, up = np.split(f32(gate_up), 2, axis=1)
    d = f32(dh)
    s = sigmoid(gate)
    d_gate = (d * up) * (s * (F32(1) + gate * (F32(1) - s)))
    gate_up[...] = np.concatenate([bf16(d_gate), bf16(d * (gate * s))], axis=1)
    return gate_up
