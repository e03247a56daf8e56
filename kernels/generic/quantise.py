"""Quantisers: rows, columns and weights become integers with one scale each, defined in kernels/reference."""

import numpy as np
import torch
from torch import Tensor

from kernels.generic.exact import divide, magnitude
from kernels.generic.numbers import ROW_FLOOR, constant, f32, finite, finite_max, fixed_sum
from kernels.generic.products import transposed
from kernels.interface import INT8_MAX, INT16_MAX, Rows, Weight

LSQ_STEP = float.fromhex("0x1.6b7612p-3")  # 2 / √127, rounded once to float32


def reciprocal(n: int) -> float:
    """f32(1/n), rounded once on the host."""
    return float(np.float32(1) / np.float32(n))


def scale_and_inverse(top: Tensor, slices: int) -> tuple[Tensor, Tensor]:
    """(scale, multiplier to codes) for maxima f32; both 0 below 2⁻⁶⁴."""
    code = INT8_MAX if slices == 1 else INT16_MAX
    live = magnitude(top) >= ROW_FLOOR
    inverse = divide(constant(code, top), torch.where(live, top, 1.0))
    return torch.where(live, top * reciprocal(code), 0.0), torch.where(live, inverse, 0.0)


def split(x: Tensor, inverse: Tensor, slices: int) -> tuple[Tensor, Tensor | None]:
    """Codes of x · inverse: (int8, None), or (hi, lo) in int8. Where x is not finite the code is 0."""
    code = torch.round(finite(x) * inverse).to(torch.int32)
    if slices == 1:
        return code.to(torch.int8), None
    hi = (code + 128) >> 8
    return hi.to(torch.int8), (code - (hi << 8)).to(torch.int8)


def quantise(x: Tensor, slices: int, flag: Tensor) -> Rows:
    """Rows of x f32[R, C]."""
    scale, inverse = scale_and_inverse(finite_max(x, flag), slices)
    hi, lo = split(x, inverse[:, None], slices)
    return Rows(hi, lo, scale)


def quantise_columns(x: Tensor, slices: int, flag: Tensor) -> Rows:
    """Columns of x f32[R, C], returned as the rows of the transpose: Rows[C, R]."""
    return quantise(transposed(x), slices, flag)


def quantise_rows(x: Tensor, slices: int, flag: Tensor) -> Rows:
    """Rows of x bf16[R, C]."""
    return quantise(f32(x), slices, flag)


def quantise_weight(w: Tensor, rule: str, flag: Tensor) -> Weight:
    """A weight f32[O, I] as int8 rows, by the rule "max" or "lsq"; the layout is its transpose, for the backward."""
    top = finite_max(w, flag)
    if rule == "max":
        scale, inverse = scale_and_inverse(top, 1)
    elif rule == "lsq":
        mean = fixed_sum(w.abs(), flag) * reciprocal(w.shape[1])
        scale = torch.where(magnitude(top) >= ROW_FLOOR, mean * LSQ_STEP, 0.0)
        live = scale > 0.0
        inverse = torch.where(live, divide(constant(1, w), torch.where(live, scale, 1.0)), 0.0)
    else:
        raise ValueError(f"weight scale rule {rule!r}: it is one of ('max', 'lsq')")
    code = torch.round(finite(w) * inverse[:, None]).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return weight_of(code, scale)


def weight_of(hi: Tensor, scale: Tensor) -> Weight:
    """A weight from its codes and scales, with the layout that this backend wants."""
    return Weight(hi, scale, transposed(hi))
