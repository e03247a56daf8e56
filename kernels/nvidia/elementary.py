"""exp2, log2 and sigmoid by the contract's polynomials, inside Triton kernels.

Definition: kernels/reference/elementary.py.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kernels.nvidia.numbers import MAGIC, MAGIC_BITS, absolute, bits, from_bits


def _constants(words: str) -> list[float]:
    return [float(np.uint32(int(word, 16)).view(np.float32)) for word in words.split()]


# The contract's polynomials, constant term first; a test compares all of these with the reference's.
EXP2 = _constants("3f800000 3f317219 3e75fdf3 3d6356d3 3c1d90e3 3aafe004 3925e3e9")
LOG2 = _constants("3fb8aa3b bf38aa33 3ef638b6 beb8b02d 3e93af55 be74d1e0 3e534979 be49cb90 3e3544ab bda97e65")
E0, E1, E2, E3, E4, E5, E6 = (tl.constexpr(c) for c in EXP2)
L0, L1, L2, L3, L4, L5, L6, L7, L8, L9 = (tl.constexpr(c) for c in LOG2)
LOG2_E = tl.constexpr(_constants("3fb8aa3b")[0])
LN_2 = tl.constexpr(_constants("3f317218")[0])
ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)


@triton.jit
def _exp2_polynomial(r):
    """2^r for |r| ≤ 1/2."""
    p = E6 * r + E5
    p = p * r + E4
    p = p * r + E3
    p = p * r + E2
    p = p * r + E1
    return p * r + E0


@triton.jit
def exp2(x):
    """2^x; below −32 and for NaN +0; above 127 as 127."""
    inside = x >= -32.0
    x = tl.where(inside, x, 0.0)
    x = tl.where(x > 127.0, 127.0, x)
    shifted = x + MAGIC
    p = _exp2_polynomial(x - (shifted - MAGIC))
    return tl.where(inside, from_bits(bits(p) + ((bits(shifted) - MAGIC_BITS) << 23)), 0.0)


@triton.jit
def exp2_down(x):
    """exp2 for x ≤ 0 or NaN, without its upper limit: what lies below −32 is computed and then dropped."""
    shifted = x + MAGIC
    p = _exp2_polynomial(x - (shifted - MAGIC))
    return tl.where(x >= -32.0, from_bits(bits(p) + (bits(shifted) << 23)), 0.0)  # MAGIC's own bits shift out


@triton.jit
def log2(x):
    """log₂ of a positive normal number; no meaning for others."""
    b = bits(x)
    exponent = (b - ROOT_HALF_BITS) >> 23
    t = from_bits(b - (exponent << 23)) - 1.0
    p = L9 * t + L8
    p = p * t + L7
    p = p * t + L6
    p = p * t + L5
    p = p * t + L4
    p = p * t + L3
    p = p * t + L2
    p = p * t + L1
    p = p * t + L0
    return exponent.to(tl.float32) + t * p


@triton.jit
def sigmoid(x):
    """1 ÷ (1 + e^−x); NaN gives 0."""
    e = exp2(-absolute(x) * LOG2_E)
    s = tl.div_rn(1.0, 1.0 + e)
    return tl.where(x >= 0.0, s, e * s)
