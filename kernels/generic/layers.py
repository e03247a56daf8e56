"""Row-wise operations of the block: embedding, RMSNorm, rotary QK-norm, SwiGLU, forward and backward."""

import numpy as np
import torch
from torch import Tensor

from kernels.generic.elementary import LOG2_E, sigmoid
from kernels.generic.exact import divide, sqrt
from kernels.generic.numbers import add_rows, bf16, constant, f32, fixed_point, fixed_sum
from kernels.generic.quantise import quantise, reciprocal
from kernels.interface import GRADIENT_BITS, SUM_LIMIT, Rope, Rows


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the table f32[V, D] as bf16[T, D]."""
    return bf16(table.index_select(0, tokens))


def embed_backward(dx: Tensor, tokens: Tensor, sums: Tensor, flag: Tensor) -> None:
    """sums[token] += rint(dx · 2²⁴) for dx bf16[T, D]."""
    add_rows(sums, tokens, fixed_point(f32(dx), GRADIENT_BITS, flag, len(tokens), SUM_LIMIT))


def inverse_rms(x: Tensor, eps: np.float32, flag: Tensor) -> Tensor:
    """1 ÷ √(mean x² + eps) of each row, f32[R]."""
    mean = fixed_sum(x * x, flag) * reciprocal(x.shape[1])
    return divide(constant(1, x), sqrt(mean + float(eps)))


def norm_rows(x: Tensor, gain: Tensor, eps: np.float32, slices: int, flag: Tensor) -> tuple[Rows, Tensor]:
    """RMSNorm with a gain, quantised by token: the rows, and the inverse root mean squares for the backward."""
    values = f32(x)
    r = inverse_rms(values, eps, flag)
    return quantise((values * r[:, None]) * gain[None, :], slices, flag), r


def norm_bf16(x: Tensor, gain: Tensor, eps: np.float32, flag: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm with a gain, kept as bf16[T, D]; and the inverse root mean squares."""
    values = f32(x)
    r = inverse_rms(values, eps, flag)
    return bf16((values * r[:, None]) * gain[None, :]), r


def norm_backward(
    dy: Tensor, x: Tensor, r: Tensor, gain: Tensor, residual: Tensor | None, sums: Tensor, flag: Tensor
) -> Tensor:
    """residual + dX of Y = x·r·gain, as bf16[T, D]; sums i64[D] gain rint(dY·x·r·2²⁴)."""
    dy_values = f32(dy)
    n = f32(x) * r[:, None]
    dx = _through_norm(dy_values * gain[None, :], n, r, flag)
    sums += torch.sum(fixed_point(dy_values * n, GRADIENT_BITS, flag, len(dy), SUM_LIMIT), 0, dtype=torch.int64)
    return bf16(dx) if residual is None else bf16(f32(residual) + dx)


def _through_norm(g: Tensor, n: Tensor, r: Tensor, flag: Tensor) -> Tensor:
    mean = fixed_sum(n * g, flag) * reciprocal(n.shape[1])
    return (g - n * mean[:, None]) * r[:, None]


def rotate_rows(y: Tensor, rope: Rope, eps: np.float32, query: bool, flag: Tensor) -> Rows:
    """Gain-free QK-norm per head, rotation of the pairs, one slice per (token, head); log₂e/√E in a query's scale."""
    width = 2 * rope.cos.shape[1]
    heads = f32(y).reshape(-1, width)
    n = heads * inverse_rms(heads, eps, flag)[:, None]
    cos, sin = _tables(rope, len(y), len(heads))
    even, odd = n[:, 0::2], n[:, 1::2]
    z = torch.empty_like(n)
    z[:, 0::2] = even * cos - odd * sin
    z[:, 1::2] = even * sin + odd * cos
    rows = quantise(z, 1, flag)
    return rows._replace(scale=rows.scale * query_factor(width)) if query else rows


def rotate_backward(dz: Tensor, y: Tensor, rope: Rope, eps: np.float32, flag: Tensor) -> Tensor:
    """The gradient of rotate_rows' input, bf16[T, H·E], from dz f32[T·H, E]."""
    width = 2 * rope.cos.shape[1]
    heads = f32(y).reshape(-1, width)
    r = inverse_rms(heads, eps, flag)
    cos, sin = _tables(rope, len(y), len(heads))
    even, odd = dz[:, 0::2], dz[:, 1::2]
    g = torch.empty_like(dz)
    g[:, 0::2] = even * cos + odd * sin
    g[:, 1::2] = odd * cos - even * sin
    return bf16(_through_norm(g, heads * r[:, None], r, flag)).reshape(y.shape)


def query_factor(width: int) -> float:
    """log₂e · (1 ÷ √E), each rounded to float32 on the host."""
    return float(np.float32(LOG2_E) * inverse_root(width))


def inverse_root(width: int) -> np.float32:
    """1 ÷ √width, each operation rounded to float32 on the host."""
    return np.float32(1) / np.sqrt(np.float32(width))


def _tables(rope: Rope, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each (token, head): whole copies, since some devices divide integers as floats."""
    windows = -(-tokens // len(rope.cos))
    cos, sin = (table.repeat_interleave(rows // tokens, 0).repeat(windows, 1)[:rows] for table in rope)
    return cos, sin


def swiglu_rows(gate_up: Tensor, slices: int, flag: Tensor) -> Rows:
    """(gate·sigmoid(gate))·up, quantised by token; gate is the first half of each row."""
    gate, up = _halves(gate_up)
    return quantise((gate * sigmoid(gate)) * up, slices, flag)


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> Tensor:
    """bf16[T, 2F] in gate_up's place, from dh: d_gate = (dh·up)·(s·(1 + gate·(1 − s))), d_up = dh·(gate·s)."""
    gate, up = _halves(gate_up)
    d = f32(dh)
    s = sigmoid(gate)
    d_gate = (d * up) * (s * (gate * (1.0 - s) + 1.0))
    return gate_up.copy_(torch.cat([bf16(d_gate), bf16(d * (gate * s))], 1))


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    width = gate_up.shape[1] // 2
    return f32(gate_up[:, :width]), f32(gate_up[:, width:])
