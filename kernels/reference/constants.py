"""Coefficients of the contract's polynomials, as float32 bits; the constant term first.

They are definitions: another set is another contract. The errors beside them are the largest ones measured through
kernels/reference/elementary.py, in float32, over every input or some millions of them.
"""

from __future__ import annotations

import numpy as np


def _floats(bits: str) -> tuple[np.float32, ...]:
    return tuple(np.uint32(int(word, 16)).view(np.float32) for word in bits.split())


# 2^r = P(r) for |r| <= 1/2; P(0) is exactly 1. Relative error 9.0e-8.
EXP2 = _floats("3f800000 3f317219 3e75fdf3 3d6356d3 3c1d90e3 3aafe004 3925e3e9")
# log2(1 + t) = t·P(t) for √½ <= 1 + t < √2. Absolute error 7.5e-8.
LOG2 = _floats("3fb8aa3b bf38aa33 3ef638b6 beb8b02d 3e93af55 be74d1e0 3e534979 be49cb90 3e3544ab bda97e65")
# The normal quantile cut at ±2σ: z = t·P(t²) for t uniform in (-1, 1). Absolute error 2.9e-4.
NORMAL = _floats("3f99baaa 3d229f92 4077ce92 c1cad0a3 42b87536 c33dc72f 435f5b3a c30c013e 4211bf05")

LOG2_E = _floats("3fb8aa3b")[0]  # float32 nearest to log2(e)
LN_2 = _floats("3f317218")[0]  # float32 nearest to ln(2)
ROOT_HALF_BITS = np.int32(0x3F3504F3)  # bits of the float32 nearest to √½
