"""Square root, division and conversions, correctly rounded on any device.

Devices, and a device's several code paths, round these differently: torch's square root on the CPU is wrong in
up to a fifth of cases. So the device's own result is only a first guess. What decides is exact: the remainder,
in integers. Nothing is probed here, since no probe covers every path that torch may take. Assumed of a device:
float32 + − ×, rint and int32 ↔ float32 round to nearest even, and integers add, multiply, shift and compare.
"""

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000  # the bits of +∞; every NaN's magnitude is larger
FRACTION, HIDDEN = 0x7FFFFF, 0x800000
SIGN = -(2**31)
SMALLEST_NORMAL = 0x00800000


def bits(x: Tensor) -> Tensor:
    """The bits of float32 values, as int32."""
    return x.view(torch.int32)


def from_bits(x: Tensor) -> Tensor:
    """The float32 values of int32 bits."""
    return x.view(torch.float32)


def magnitude(x: Tensor) -> Tensor:
    """The bits of |x|: they compare as the values do, and a NaN is the largest of all."""
    return bits(x) & MAGNITUDE


def power_of_two(k: Tensor) -> Tensor:
    """2^k as f32, for int32 k from −126 to 127."""
    return from_bits((k + 127) << 23)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a ÷ b in float32, rounded to nearest even; both broadcast. A quotient below 2⁻¹²⁶ is a zero of its sign.

    With mantissas m_a, m_b of 24 bits, the result's is the whole number nearest to m_a·2^s ÷ m_b; no tie exists.
    """
    a, b = torch.broadcast_tensors(a, b)
    bits_a, bits_b = bits(a), bits(b)
    m_a, m_b = ((x & FRACTION | HIDDEN).to(torch.int64) for x in (bits_a, bits_b))
    below = (m_a < m_b).to(torch.int64)
    numerator = m_a << (below + 23)
    divisor = m_b.to(torch.float32)
    q = torch.round(m_a.to(torch.float32) / divisor * power_of_two((below + 23).to(torch.int32))).to(torch.int64)
    q += torch.round((numerator - q * m_b).to(torch.float32) / divisor).to(torch.int64)  # from some units off to one
    rest = (numerator - q * m_b) * 2
    q += (rest > m_b).to(torch.int64) - (rest < -m_b).to(torch.int64)
    exponent_a, exponent_b = (bits_a >> 23) & 255, (bits_b >> 23) & 255
    exponent = exponent_a - exponent_b + 127 - below.to(torch.int32)
    result = (exponent.clamp(0, 255) << 23) | (q.to(torch.int32) & FRACTION)
    result = torch.where(exponent <= 0, 0, torch.where(exponent >= 255, INFINITE, result)) | ((bits_a ^ bits_b) & SIGN)
    return torch.where(_ordinary(exponent_a) & _ordinary(exponent_b), from_bits(result), a / b)


def _ordinary(exponent: Tensor) -> Tensor:
    """Neither zero, subnormal, infinite nor NaN: what IEEE defines for those, every device does."""
    return (exponent > 0) & (exponent < 255)


def sqrt(x: Tensor) -> Tensor:
    """√x of float32, rounded to nearest even. No tie exists: r + ½ squared is no whole number."""
    x_bits = bits(x)
    exponent = (x_bits >> 23) & 255
    odd = (exponent + 1) & 1
    # x by an even power of two, from 2^46 to 2^48: its root has 24 bits
    square = (x_bits & FRACTION | HIDDEN).to(torch.int64) << (odd + 23).to(torch.int64)
    r = torch.round(torch.sqrt(square.to(torch.float32))).to(torch.int64)
    r += torch.round((square - r * r).to(torch.float32) / (2 * r).to(torch.float32)).to(torch.int64)
    rest = square - r * r
    r += (rest > r).to(torch.int64) - (rest <= -r).to(torch.int64)
    result = ((((exponent - 173 - odd) >> 1) + 150) << 23) | (r.to(torch.int32) & FRACTION)
    return torch.where((x_bits >= SMALLEST_NORMAL) & (x_bits < INFINITE), from_bits(result), torch.sqrt(x))


def f32_of_i64(x: Tensor) -> Tensor:
    """int64 → float32, rounded once to nearest even, for |x| < 2⁶³.

    Shifted down to 28 or 29 bits, the lost ones joined into the last, a number rounds from int32 as it would whole.
    """
    size = x.abs()
    high = (size >> 31).clamp(max=2**31 - 1).to(torch.int32)  # keeps its leading place, which is all that it is for
    shift = torch.where(high > 0, (bits(high.to(torch.float32)) >> 23) - 124, 0)  # 3 + the place of the leading bit
    wide = shift.to(torch.int64)
    kept = size >> wide
    kept |= (kept << wide != size).to(torch.int64)
    value = kept.to(torch.int32).to(torch.float32) * power_of_two(shift)
    return torch.where(x < 0, -value, value)


def i64_of_f32(x: Tensor) -> Tensor:
    """Whole float32 → int64, exact for |x| < 2⁶², in two halves that int32 holds."""
    high = torch.round(x * 2.0**-31)
    low = x - high * 2.0**31
    return (high.to(torch.int32).to(torch.int64) << 31) + low.to(torch.int32)
