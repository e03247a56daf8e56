"""exp2, log2, sigmoid and the normal quantile: the order of operations here is their definition.

Every line is element-wise float32, rounded to nearest even after each operation and never contracted into an FMA, or
exact on integers. A subnormal input or product only ever meets a sum with a far larger constant, so flushing it changes
no bit. How far the results are from the truth is tested apart.
"""

from __future__ import annotations

import numpy as np

from kernels.reference.constants import EXP2, LOG2, LOG2_E, NORMAL, ROOT_HALF_BITS

F32, I32, U32 = np.float32, np.int32, np.uint32


def _horner(coefficients: tuple[np.float32, ...], x: np.ndarray) -> np.ndarray:
    """((c[n]·x + c[n-1])·x + …)·x + c[0], the product and the sum each rounded."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x, float32 in and out, any shape. x < -32 and NaN give +0; x > 127 counts as 127; exact at whole x."""
    inside = x >= F32(-32)
    x = np.where(inside, x, F32(0))
    x = np.where(x > F32(127), F32(127), x)
    whole = np.rint(x)
    fraction = x - whole  # exact, within ±1/2
    bits = _horner(EXP2, fraction).view(I32) + (whole.astype(I32) << I32(23))
    return np.where(inside, bits.view(F32), F32(0))


def log2(x: np.ndarray) -> np.ndarray:
    """Logarithm to base 2 of positive normal float32, any shape; another x gives a number without meaning, no fault."""
    bits = x.view(I32)
    exponent = (bits - ROOT_HALF_BITS) >> I32(23)  # arithmetic shift: x = m·2^exponent with √½ <= m < √2
    mantissa = (bits - (exponent << I32(23))).view(F32)
    t = mantissa - F32(1)  # exact
    return exponent.astype(F32) + t * _horner(LOG2, t)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1/(1 + e^-x), float32 in and out, any shape. Exactly 0 where -x·log2(e) > 32; NaN gives 0."""
    e = exp2(-np.abs(x) * LOG2_E)
    s = F32(1) / (F32(1) + e)
    return np.where(x >= F32(0), s, e * s)


def normal_cut(words: np.ndarray) -> np.ndarray:
    """uint32 random words → float32 standard normal cut at ±2σ, one for one.

    t is the middle of one of 2^24 equal cells of (-1, 1), never 0; z = t·P(t²) is within 3e-4 of the quantile, |z| < 2.
    """
    odd = (words >> U32(8)).view(I32) * I32(2) + I32(1 - 2**24)  # exact in float32: below 2^24
    t = odd.astype(F32) * F32(2.0**-24)
    return t * _horner(NORMAL, t * t)
