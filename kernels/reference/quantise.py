"""Quantisers: rows, columns and weights become integers with one scale each.

A scale is max · f32(1/Q), a code rint(x · (Q ÷ max)), with Q = 127 for one slice and 32,512 = 127·256 for two. A row
whose maximum is below 2⁻⁶⁴ is zero. Two slices: q = hi·256 + lo with lo in −128…127.
"""

import numpy as np

from kernels.interface import INT8_MAX, INT16_MAX, Rows, Weight
from kernels.reference.numbers import F32, ROW_FLOOR, f32, finite_max, fixed_sum

LSQ_STEP = F32(float.fromhex("0x1.6b7612p-3"))  # 2 / √127, rounded once


def largest_code(slices: int) -> int:
    """127 for one slice, 32,512 for two."""
    return INT8_MAX if slices == 1 else INT16_MAX


def scale_and_inverse(top: np.ndarray, slices: int) -> tuple[np.ndarray, np.ndarray]:
    """(scale, multiplier to codes) for maxima f32; both 0 below 2⁻⁶⁴."""
    code = F32(largest_code(slices))
    live = top >= ROW_FLOOR
    inverse = np.where(live, code / np.where(live, top, F32(1)), F32(0))
    return np.where(live, top * (F32(1) / code), F32(0)), inverse


def split(x: np.ndarray, inverse: np.ndarray, slices: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes of x · inverse: (int8, None), or (hi, lo) in int8. Where x is not finite the code is 0."""
    code = np.rint(np.where(np.isfinite(x), x, F32(0)) * inverse).astype(np.int32)
    if slices == 1:
        return code.astype(np.int8), None
    hi = (code + np.int32(128)) >> np.int32(8)
    return hi.astype(np.int8), (code - hi * np.int32(256)).astype(np.int8)


def quantise(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """Rows of x f32[R, C]."""
    scale, inverse = scale_and_inverse(finite_max(x, 1, flag), slices)
    hi, lo = split(x, inverse[:, None], slices)
    return Rows(hi, lo, scale)


def quantise_columns(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """Columns of x f32[R, C], returned as the rows of the transpose: Rows[C, R]."""
    return quantise(np.ascontiguousarray(x.T), slices, flag)


def quantise_rows(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """Rows of x bf16[R, C]."""
    return quantise(f32(x), slices, flag)


def quantise_weight(w: np.ndarray, rule: str, flag: np.ndarray) -> Weight:
    """A weight f32[O, I] as int8 rows. Rule "max": the row's maximum becomes 127. Rule "lsq": the step is
    2·mean|w|/√127."""
    top = finite_max(w, 1, flag)
    if rule == "max":
        scale, inverse = scale_and_inverse(top, 1)
    elif rule == "lsq":
        mean = fixed_sum(np.abs(w), flag) * (F32(1) / F32(w.shape[1]))
        scale = np.where(top >= ROW_FLOOR, mean * LSQ_STEP, F32(0))
        live = scale > F32(0)
        inverse = np.where(live, F32(1) / np.where(live, scale, F32(1)), F32(0))
    else:
        raise ValueError(f"weight scale rule {rule!r}: it is one of ('max', 'lsq')")
    code = np.rint(np.where(np.isfinite(w), w, F32(0)) * inverse[:, None])
    code = np.clip(code, F32(-INT8_MAX), F32(INT8_MAX))
    return Weight(code.astype(np.int8), scale)
