"""Gradient norms and AdamW, one pass over memory each. Definitions: kernels/reference/optimizer.py.

`sums` are i64, or the f32 mean of an ordered reduction.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.numeric import OPTIONS, PARALLEL, all_done, f32_of_gradient, fixed_sum_row, floor, sqrt
from kernels.interface import AdamScalars

GRADIENT_FLOOR = np.float32(2.0**-48).view(np.int32)
MOMENT_FLOOR = np.float32(2.0**-64).view(np.int32)
SQUARE_FLOOR = np.float32(2.0**-100).view(np.int32)
WEIGHT_FLOOR = np.float32(2.0**-64).view(np.int32)
BLOCK = 1 << 14  # elements that one thread takes at a time


@exclusive
def square_rows(sums: np.ndarray, mean: np.float32) -> np.ndarray:
    """Σ g² of each row, f32[R], for g = f32(sums)·mean. A vector is one row."""
    rows = sums.reshape(1 if sums.ndim == 1 else len(sums), -1)
    out = np.empty(len(rows), np.float32)
    _square_rows(rows, np.float32(mean), out, np.zeros(1, np.int32))
    return out


@njit(**PARALLEL)
def _square_rows(sums, mean, out, flag):
    done = 0
    for i in prange(sums.shape[0]):
        work = np.empty(sums.shape[1], np.float32)
        _squares(sums[i], mean, work)
        out[i] = fixed_sum_row(work, flag)
        done += 1
    all_done(done, sums.shape[0])


@njit(**OPTIONS)
def _squares(sums, mean, out):
    for j in range(sums.size):
        g = f32_of_gradient(sums[j]) * mean
        out[j] = g * g


@exclusive
def adamw(p: np.ndarray, m: np.ndarray, v: np.ndarray, sums: np.ndarray, s: AdamScalars) -> None:
    """One AdamW update, in place. Values below their floors become +0: gradient 2⁻⁴⁸, m and p 2⁻⁶⁴, v 2⁻¹⁰⁰.

    p, m and v must be C-contiguous. Raises ValueError if one is not, because a copy would be updated instead.
    """
    if not (p.flags.c_contiguous and m.flags.c_contiguous and v.flags.c_contiguous):
        raise ValueError("adamw updates weights and moments in place: they must be C-contiguous")
    scalars = AdamScalars(*(np.float32(x) for x in s))
    _adamw(p.reshape(-1), m.reshape(-1), v.reshape(-1), sums.reshape(-1), scalars)


@njit(**PARALLEL)
def _adamw(p, m, v, sums, s):
    for block in prange((p.size + BLOCK - 1) // BLOCK):
        part = slice(block * BLOCK, min(p.size, (block + 1) * BLOCK))
        _update(p[part], m[part], v[part], sums[part], s)


@njit(**OPTIONS)
def _update(p, m, v, sums, s):
    for i in range(p.size):
        g = floor((f32_of_gradient(sums[i]) * s.mean) * s.clip, GRADIENT_FLOOR)
        m[i] = floor(s.beta1 * m[i] + s.one_minus_beta1 * g, MOMENT_FLOOR)
        v[i] = floor(s.beta2 * v[i] + s.one_minus_beta2 * (g * g), SQUARE_FLOOR)
        update = (m[i] * s.correction1) / (sqrt(v[i] * s.correction2) + s.eps)
        p[i] = floor(p[i] * s.decay - s.lr * update, WEIGHT_FLOOR)
