"""Row-wise operations: embedding, RMSNorm, rotary QK-norm, SwiGLU, forward and backward, each one pass over memory.

Threads take blocks of rows (or of columns, for scatters). What crosses a block is an integer: no split shows in a bit.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.numeric import (
    F1,
    I0,
    LOG2_E,
    OPTIONS,
    PARALLEL,
    all_done,
    bf16,
    f32_of_bf16,
    fixed_point,
    fixed_point_bad,
    fixed_sum_row,
    from_bits,
    largest,
    magnitude,
    quantise_row,
    sigmoid,
    sqrt,
)
from kernels.interface import Rope, Rows

BLOCK = 32  # rows, or columns, that one thread takes at a time
GRADIENT_UNIT = np.float32(2.0**24)
SUM_LIMIT = np.float32(2.0**27)


def empty_codes(rows: int, columns: int, slices: int) -> tuple[np.ndarray, np.ndarray]:
    """Fresh (hi, lo) int8[R, C]; for one slice lo is hi itself, which kernels then do not touch twice."""
    hi = np.empty((rows, columns), np.int8)
    return hi, hi if slices == 1 else np.empty_like(hi)


def rows_of(hi: np.ndarray, lo: np.ndarray, scale: np.ndarray) -> Rows:
    """Rows from arrays made by empty_codes."""
    return Rows(hi, None if lo is hi else lo, scale)


def reciprocal(count: int) -> np.float32:
    """f32(1/count): a mean multiplies by it."""
    return np.float32(1) / np.float32(count)


@exclusive
def embed(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows of the table f32[V, D] as bf16[T, D]."""
    out = np.empty((len(tokens), table.shape[1]), np.uint16)
    _embed(table, tokens, out)
    return out


@njit(**PARALLEL)
def _embed(table, tokens, out):
    for t in prange(tokens.size):
        row = table[tokens[t]]
        for j in range(row.size):
            out[t, j] = bf16(row[j])


@exclusive
def embed_backward(dx: np.ndarray, tokens: np.ndarray, sums: np.ndarray, flag: np.ndarray) -> None:
    """sums[token] += rint(dx · 2²⁴) for dx bf16[T, D]."""
    _embed_backward(dx, tokens, np.float32(len(tokens)), sums, flag)


@njit(**PARALLEL)
def _embed_backward(dx, tokens, terms, sums, flag):
    width = dx.shape[1]
    for block in prange((width + BLOCK - 1) // BLOCK):  # a block of columns, so that no two threads meet in a row
        first, last = block * BLOCK, min(width, (block + 1) * BLOCK)
        for t in range(tokens.size):
            _scatter_row(dx[t, first:last], terms, sums[tokens[t], first:last], flag)


@njit(**OPTIONS)
def _scatter_row(dx, terms, sums, flag):
    top = I0
    for j in range(dx.size):
        x = f32_of_bf16(dx[j])
        top = largest(top, magnitude(x))
        sums[j] += fixed_point(x, GRADIENT_UNIT, terms, SUM_LIMIT)
    if fixed_point_bad(from_bits(top), terms, SUM_LIMIT):
        flag[0] = 1


@njit(**OPTIONS)
def inverse_rms(x, square, eps, mean, flag):
    """1 ÷ √(mean x² + eps) of a bf16 row; `square` f32[C] is working space, `mean` f32(1/C)."""
    for j in range(x.size):
        value = f32_of_bf16(x[j])
        square[j] = value * value
    return F1 / sqrt(fixed_sum_row(square, flag) * mean + eps)


@exclusive
def norm_rows(
    x: np.ndarray, gain: np.ndarray, eps: np.float32, slices: int, flag: np.ndarray
) -> tuple[Rows, np.ndarray]:
    """RMSNorm with a gain, quantised by token: the rows, and the inverse root mean squares for the backward."""
    hi, lo = empty_codes(x.shape[0], x.shape[1], slices)
    scale, r = np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    _norm_rows(x, gain, np.float32(eps), reciprocal(x.shape[1]), slices, flag, hi, lo, scale, r)
    return rows_of(hi, lo, scale), r


@njit(**PARALLEL)
def _norm_rows(x, gain, eps, mean, slices, flag, hi, lo, scale, r):
    rows, width = x.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            r[t] = inverse_rms(x[t], work, eps, mean, flag)
            _scaled_row(x[t], r[t], gain, work)
            scale[t] = quantise_row(work, slices, hi[t], lo[t], flag)
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _scaled_row(x, r, gain, out):
    for j in range(x.size):
        out[j] = (f32_of_bf16(x[j]) * r) * gain[j]


@exclusive
def norm_bf16(x: np.ndarray, gain: np.ndarray, eps: np.float32, flag: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RMSNorm with a gain, kept as bf16[T, D]: the residual stream's first value; and the inverse root mean squares."""
    out, r = np.empty(x.shape, np.uint16), np.empty(len(x), np.float32)
    _norm_bf16(x, gain, np.float32(eps), reciprocal(x.shape[1]), flag, out, r)
    return out, r


@njit(**PARALLEL)
def _norm_bf16(x, gain, eps, mean, flag, out, r):
    rows, width = x.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            r[t] = inverse_rms(x[t], work, eps, mean, flag)
            _scaled_row(x[t], r[t], gain, work)
            _store_row(work, x[t], False, out[t])
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@exclusive
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
    out = np.empty(dy.shape, np.uint16)
    blocks = np.zeros(((len(dy) + BLOCK - 1) // BLOCK, dy.shape[1]), np.int64)
    add = residual is not None
    other = dy if residual is None else residual
    _norm_backward(dy, x, r, gain, other, add, reciprocal(dy.shape[1]), np.float32(len(dy)), blocks, out, flag)
    sums += blocks.sum(axis=0, dtype=np.int64)
    return out


@njit(**PARALLEL)
def _norm_backward(dy, x, r, gain, residual, add, mean, terms, blocks, out, flag):
    rows, width = dy.shape
    done = 0
    for block in prange(blocks.shape[0]):
        n, g, work = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            _gain_row(dy[t], x[t], r[t], gain, terms, n, g, blocks[block], flag)
            through_norm(n, g, r[t], mean, work, flag)
            _store_row(g, residual[t], add, out[t])
        done += 1
    all_done(done, blocks.shape[0])


@njit(**OPTIONS)
def _gain_row(dy, x, r, gain, terms, n, g, sums, flag):
    """n = x·r and g = dY·gain of one row; sums += rint(dY·n·2²⁴)."""
    top = I0
    for j in range(dy.size):
        d = f32_of_bf16(dy[j])
        n[j] = f32_of_bf16(x[j]) * r
        g[j] = d * gain[j]
        product = d * n[j]
        top = largest(top, magnitude(product))
        sums[j] += fixed_point(product, GRADIENT_UNIT, terms, SUM_LIMIT)
    if fixed_point_bad(from_bits(top), terms, SUM_LIMIT):
        flag[0] = 1


@njit(**OPTIONS)
def through_norm(n, g, r, mean, work, flag):
    """g := (g − n·mean(n·g))·r."""
    for j in range(n.size):
        work[j] = n[j] * g[j]
    average = fixed_sum_row(work, flag) * mean
    for j in range(n.size):
        g[j] = (g[j] - n[j] * average) * r


@njit(**OPTIONS)
def _store_row(x, residual, add, out):
    if add:
        for j in range(x.size):
            out[j] = bf16(f32_of_bf16(residual[j]) + x[j])
    else:
        for j in range(x.size):
            out[j] = bf16(x[j])


@exclusive
def rotate_rows(y: np.ndarray, rope: Rope, eps: np.float32, query: bool, flag: np.ndarray) -> Rows:
    """Gain-free QK-norm per head, then rotation of the pairs (even, odd), then one slice per (token, head).

    A query's scale also takes log₂e/√E, so that scores come out in bits of exponent.
    """
    width = 2 * rope.cos.shape[1]
    heads = y.shape[1] // width
    factor = LOG2_E * (F1 / np.sqrt(np.float32(width))) if query else F1
    hi = np.empty((len(y) * heads, width), np.int8)
    scale = np.empty(len(hi), np.float32)
    eps, mean = np.float32(eps), reciprocal(width)
    _rotate_rows(y.reshape(hi.shape), rope.cos, rope.sin, heads, eps, mean, factor, hi, scale, flag)
    return Rows(hi, None, scale)


@njit(**PARALLEL)
def _rotate_rows(y, cos, sin, heads, eps, mean, factor, hi, scale, flag):
    rows, width = y.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        z = np.empty(width, np.float32)
        for i in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            r = inverse_rms(y[i], z, eps, mean, flag)
            position = (i // heads) % cos.shape[0]
            _rotate(y[i], r, cos[position], sin[position], z)
            scale[i] = quantise_row(z, 1, hi[i], hi[i], flag) * factor
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _rotate(y, r, cos, sin, z):
    for j in range(cos.size):
        even, odd = f32_of_bf16(y[2 * j]) * r, f32_of_bf16(y[2 * j + 1]) * r
        z[2 * j] = even * cos[j] - odd * sin[j]
        z[2 * j + 1] = even * sin[j] + odd * cos[j]


@exclusive
def rotate_backward(dz: np.ndarray, y: np.ndarray, rope: Rope, eps: np.float32, flag: np.ndarray) -> np.ndarray:
    """The gradient of rotate_rows' input, bf16[T, H·E], from dz f32[T·H, E]."""
    width = dz.shape[1]
    out = np.empty(y.shape, np.uint16)
    heads = y.shape[1] // width
    shape = dz.shape
    eps, mean = np.float32(eps), reciprocal(width)
    _rotate_backward(dz, y.reshape(shape), rope.cos, rope.sin, heads, eps, mean, out.reshape(shape), flag)
    return out


@njit(**PARALLEL)
def _rotate_backward(dz, y, cos, sin, heads, eps, mean, out, flag):
    rows, width = y.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        n, g, work = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        for i in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            r = inverse_rms(y[i], work, eps, mean, flag)
            position = (i // heads) % cos.shape[0]
            _unrotate(dz[i], y[i], r, cos[position], sin[position], n, g)
            through_norm(n, g, r, mean, work, flag)
            _store_row(g, y[i], False, out[i])
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _unrotate(dz, y, r, cos, sin, n, g):
    for j in range(cos.size):
        even, odd = dz[2 * j], dz[2 * j + 1]
        g[2 * j] = even * cos[j] + odd * sin[j]
        g[2 * j + 1] = odd * cos[j] - even * sin[j]
    for j in range(y.size):
        n[j] = f32_of_bf16(y[j]) * r


@exclusive
def swiglu_rows(gate_up: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """(gate·sigmoid(gate))·up, quantised by token; gate is the first half of each row."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    hi, lo = empty_codes(tokens, width, slices)
    scale = np.empty(tokens, np.float32)
    _swiglu_rows(gate_up, slices, hi, lo, scale, flag)
    return rows_of(hi, lo, scale)


@njit(**PARALLEL)
def _swiglu_rows(gate_up, slices, hi, lo, scale, flag):
    rows, width = hi.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        h = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            _swiglu(gate_up[t, :width], gate_up[t, width:], h)
            scale[t] = quantise_row(h, slices, hi[t], lo[t], flag)
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _swiglu(gate, up, h):
    for j in range(h.size):
        g = f32_of_bf16(gate[j])
        h[j] = (g * sigmoid(g)) * f32_of_bf16(up[j])


@exclusive
def swiglu_backward(dh: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """bf16[T, 2F] in gate_up's place, from dh: d_gate = (dh·up)·(s·(1 + gate·(1 − s))), d_up = dh·(gate·s)."""
    _swiglu_backward(dh, gate_up)
    return gate_up


@njit(**PARALLEL)
def _swiglu_backward(dh, gate_up):
    rows, width = dh.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(2 * width, np.uint16)  # written apart: no loop is vectorised that writes where it reads
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            _swiglu_gradient(dh[t], gate_up[t, :width], gate_up[t, width:], work[:width], work[width:])
            for j in range(2 * width):
                gate_up[t, j] = work[j]
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _swiglu_gradient(dh, gate, up, d_gate, d_up):
    for j in range(dh.size):
        d, g = f32_of_bf16(dh[j]), f32_of_bf16(gate[j])
        s = sigmoid(g)
        d_gate[j] = bf16((d * f32_of_bf16(up[j])) * (s * (F1 + g * (F1 - s))))
        d_up[j] = bf16(d * (g * s))
