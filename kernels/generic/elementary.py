"""exp2, log2, sigmoid and the normal quantile as the contract defines them, in torch operations of one rounding."""

import numpy as np
import torch
from torch import Tensor

from kernels.generic.exact import bits, divide, from_bits, magnitude
from kernels.generic.numbers import constant


def _floats(words: str) -> tuple[float, ...]:
    return tuple(float(np.uint32(int(word, 16)).view(np.float32)) for word in words.split())


# The contract's polynomials, constant term first; equal to the reference's by a test. Each value is exactly a float32.
EXP2 = _floats("3f800000 3f317219 3e75fdf3 3d6356d3 3c1d90e3 3aafe004 3925e3e9")
LOG2 = _floats("3fb8aa3b bf38aa33 3ef638b6 beb8b02d 3e93af55 be74d1e0 3e534979 be49cb90 3e3544ab bda97e65")
NORMAL = _floats("3f99baaa 3d229f92 4077ce92 c1cad0a3 42b87536 c33dc72f 435f5b3a c30c013e 4211bf05")
LOG2_E = _floats("3fb8aa3b")[0]
LN_2 = _floats("3f317218")[0]
ROOT_HALF_BITS = 0x3F3504F3


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value.mul_(x).add_(coefficient)
    return value


def exp2(x: Tensor) -> Tensor:
    """2^x, float32. x < −32 and NaN give +0; x > 127 counts as 127."""
    inside = x >= -32.0
    x = torch.where(inside, x, 0.0).clamp_(max=127.0)
    whole = torch.round(x)
    result = bits(_horner(EXP2, x - whole)) + (whole.to(torch.int32) << 23)
    return from_bits(torch.where(inside, result, 0))


def log2(x: Tensor) -> Tensor:
    """Logarithm to base 2 of positive normal float32."""
    raw = bits(x)
    exponent = (raw - ROOT_HALF_BITS) >> 23
    t = from_bits(raw - (exponent << 23)) - 1.0
    return exponent.to(torch.float32) + t * _horner(LOG2, t)


def sigmoid(x: Tensor) -> Tensor:
    """1/(1 + e^−x), float32; NaN gives 0."""
    e = exp2(-from_bits(magnitude(x)) * LOG2_E)
    s = divide(constant(1, x), e + 1.0)
    return torch.where(x >= 0.0, s, e * s)


def normal_cut(words: Tensor) -> Tensor:
    """Random words, int64 of 32 bits → float32 standard normal cut at ±2σ."""
    odd = ((words >> 8) * 2 + (1 - 2**24)).to(torch.int32)
    t = odd.to(torch.float32) * 2.0**-24
    return t * _horner(NORMAL, t * t)
