"""Numbers of the contract: bf16 as bits, maxima on bits, and sums of floats as sums of integers.

Everything is element-wise float32 or exact integers. A subnormal or its flushed zero never makes a difference: stores
flush below 2⁻¹⁰⁰, and no fixed-point multiplier exceeds 2¹⁰⁰.
"""

import numpy as np

F32 = np.float32
INFINITE = 0x7F800000  # the bits of +∞; every NaN's magnitude is larger
STORE_FLOOR = F32(2.0**-100)
ROW_FLOOR = F32(2.0**-64)


def bf16(x: np.ndarray) -> np.ndarray:
    """f32 → bf16 bits, nearest even; |x| < 2⁻¹⁰⁰ becomes +0. NaN stays NaN."""
    x = np.where(np.abs(x) < STORE_FLOOR, F32(0), x)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(INFINITE)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def f32(x: np.ndarray) -> np.ndarray:
    """bf16 bits → f32, exact."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def max_bits(x: np.ndarray, axis: int) -> np.ndarray:
    """The largest |x| along `axis`, as int32 bits: order-free, and a NaN shows as the largest of all."""
    return np.max(np.ascontiguousarray(x).view(np.int32) & np.int32(0x7FFFFFFF), axis=axis)


def finite_max(x: np.ndarray, axis: int, flag: np.ndarray) -> np.ndarray:
    """The largest |x| along `axis` as f32; where it is not finite the flag is raised and the maximum counts as 0."""
    top = max_bits(x, axis)
    raise_flag(flag, top >= INFINITE)
    return np.where(top >= INFINITE, np.int32(0), top).view(np.float32)


def raise_flag(flag: np.ndarray, condition: np.ndarray) -> None:
    """Set the step's flag if the condition holds anywhere."""
    flag[0] |= np.any(condition)


def power_of_two(k: np.ndarray) -> np.ndarray:
    """2^k as f32, for −126 ≤ k ≤ 127."""
    return ((k.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)


def fixed_sum(x: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """The sum of each row of x f32[R, C], as f32[R]: exact in a fixed point chosen from the row's maximum, rounded
    once.

    With 2^E ≤ max|x| < 2^(E+1) and k = min(61 − ⌈log₂ C⌉ − E, 100), the sum of rint(x·2^k) stays below 2⁶² in int64.
    A row that is not finite, or whose sum is beyond float32, raises the flag and sums to 0.
    """
    top = finite_max(x, 1, flag)
    x = np.where((top > 0)[:, None], x, F32(0))
    exponent = (top.view(np.int32) >> np.int32(23)) - np.int32(127)
    k = np.minimum(np.int32(61 - ceil_log2(x.shape[1])) - exponent, np.int32(100))
    total = np.sum(np.rint(x * power_of_two(k)[:, None]).astype(np.int64), axis=1, dtype=np.int64)
    result = np.where(top > 0, total.astype(np.float32) * power_of_two(-k), F32(0))
    beyond = ~np.isfinite(result)
    raise_flag(flag, beyond)
    return np.where(beyond, F32(0), result)


def fixed_point(x: np.ndarray, bits: int, flag: np.ndarray, terms: int, limit: int) -> np.ndarray:
    """rint(x · 2^bits) as int64. Raises the flag where |x| · terms ≥ 2^limit or x is not finite; such values count as
    0."""
    bad = ~(np.abs(x) * F32(terms) < F32(2.0**limit))
    raise_flag(flag, bad)
    return np.rint(np.where(bad, F32(0), x) * F32(2.0**bits)).astype(np.int64)


def ceil_log2(n: int) -> int:
    """⌈log₂ n⌉ for n ≥ 1."""
    return (n - 1).bit_length()
