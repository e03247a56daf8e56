"""Gradient norms and AdamW, element by element, from exact integer sums: i64, which are rounded once to f32.

Of a run whose reduction is ordered, `sums` are its f32 mean, which is used as it is.
"""

import numpy as np

from kernels.interface import AdamScalars
from kernels.reference.numbers import F32, fixed_sum

GRADIENT_FLOOR = F32(2.0**-48)
MOMENT_FLOOR = F32(2.0**-64)
SQUARE_FLOOR = F32(2.0**-100)
WEIGHT_FLOOR = F32(2.0**-64)


def square_rows(sums: np.ndarray, mean: np.float32) -> np.ndarray:
    """Σ g² of each row, f32[R], for g = f32(sums)·mean. A vector is one row."""
    g = sums.reshape(1 if sums.ndim == 1 else len(sums), -1).astype(np.float32) * mean
    return fixed_sum(g * g, np.zeros(1, np.int32))


def adamw(p: np.ndarray, m: np.ndarray, v: np.ndarray, sums: np.ndarray, s: AdamScalars) -> None:
    """One AdamW update, in place. Values below their floors become +0: gradient 2⁻⁴⁸, m and p 2⁻⁶⁴, v 2⁻¹⁰⁰."""
    g = floor((sums.astype(np.float32) * s.mean) * s.clip, GRADIENT_FLOOR)
    m[...] = floor(s.beta1 * m + s.one_minus_beta1 * g, MOMENT_FLOOR)
    v[...] = floor(s.beta2 * v + s.one_minus_beta2 * (g * g), SQUARE_FLOOR)
    update = (m * s.correction1) / (np.sqrt(v * s.correction2) + s.eps)
    p[...] = floor(p * s.decay - s.lr * update, WEIGHT_FLOOR)


def floor(x: np.ndarray, smallest: np.float32) -> np.ndarray:
    """+0 where |x| < smallest."""
    return np.where(np.abs(x) < smallest, F32(0), x)
