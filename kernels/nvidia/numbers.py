"""The contract's numbers inside Triton kernels: every function here is inlined into the kernels of this package.

Written with float32 + − ×, `tl.div_rn`, `tl.sqrt_rn`, integer operations and bitcasts alone, which NVIDIA's processors
round to nearest even; every kernel is launched through `launch`, which forbids fused multiply-adds. Triton has no rint,
truncates where it converts to integers, and hides NaN in maxima: so rounding adds a large number, and maxima are taken
on bits. bf16 tensors are int16 of the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from kernels.interface import GRADIENT_BITS, INT8_MAX, INT16_MAX

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid of programs, without fused multiply-adds; nothing where the grid is empty.

    RuntimeError where Triton cannot compile it or the device lacks what it takes.
    """
    if min(grid):
        try:
            kernel[grid](*arguments, **constants, enable_fp_fusion=False)
        except TritonError as error:
            name = getattr(kernel, "__name__", kernel)
            raise RuntimeError(f"the kernel {name} does not run on this device: {error}") from error
        if kept := getattr(kernel, "used_global_vals", None):
            kept.clear()  # else every launch compares each constant of its module again, which takes longer than itself


def bits_of(value: float) -> int:
    """The float32 bits of a positive host constant."""
    return int(np.float32(value).view(np.int32))


SIGN = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # the bits of +∞; every NaN's magnitude is larger
LOWEST = tl.constexpr(-(2**31))
STORE_FLOOR = tl.constexpr(bits_of(2.0**-100))
ROW_FLOOR = tl.constexpr(bits_of(2.0**-64))
MAGIC = tl.constexpr(1.5 * 2.0**23)  # x + MAGIC has whole spacing for |x| < 2²²
MAGIC_BITS = tl.constexpr(bits_of(1.5 * 2.0**23))
WHOLE = tl.constexpr(2.0**23)  # from here on every float32 is whole
CODE_1, CODE_2 = tl.constexpr(float(INT8_MAX)), tl.constexpr(float(INT16_MAX))
GRADIENT_UNIT = tl.constexpr(2.0**GRADIENT_BITS)
UNIT_1, UNIT_2 = (tl.constexpr(float(np.float32(1) / np.float32(code))) for code in (INT8_MAX, INT16_MAX))


@triton.jit
def bits(x):
    """The bits of f32 values, i32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x):
    """The f32 values of i32 bits."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """The bits of |x|: they compare as the values do, and a NaN is the largest of all."""
    return bits(x) & SIGN


@triton.jit
def absolute(x):
    """|x|."""
    return from_bits(magnitude(x))


@triton.jit
def key_bits(b):
    """Between a float's bits and an i32 that compares as the value does (−0 below +0); its own inverse."""
    return b ^ ((b >> 31) & SIGN)


@triton.jit
def order_key(x):
    """An i32 that compares as the f32 value does."""
    return key_bits(bits(x))


@triton.jit
def f32_of_bf16(x):
    """bf16 bits (int16) → f32, exact."""
    return from_bits(x.to(tl.int32) << 16)


@triton.jit
def bf16(x):
    """f32 → bf16 bits (int16), nearest even; |x| < 2⁻¹⁰⁰ becomes +0, a NaN the one quiet NaN."""
    b = bits(x)
    size = b & SIGN
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16  # arithmetic shift: the sign ends in int16's own
    rounded = tl.where(size < STORE_FLOOR, 0, rounded)
    return tl.where(size > INFINITE, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def i32_of_small(x):
    """Nearest whole number as i32, ties to even, for |x| < 2²²."""
    return bits(x + MAGIC) - MAGIC_BITS


@triton.jit
def rint(x):
    """Nearest whole f32, ties to even, for any finite x (a −0 becomes +0 or stays)."""
    size = absolute(x)
    whole = tl.where(size < WHOLE, (size + WHOLE) - WHOLE, size)
    return from_bits(bits(whole) | (bits(x) & LOWEST))


@triton.jit
def i64_of(x):
    """Nearest whole number as i64, ties to even, for |x| < 2⁶³."""
    return rint(x).to(tl.int64)


@triton.jit
def power_of_two(k):
    """2^k for i32 −126 ≤ k ≤ 127."""
    return from_bits((k + 127) << 23)


@triton.jit
def checked_top(top, flag):
    """Bits of maxima; where one is not finite it becomes 0 and the flag is raised. Call once for each row."""
    bad = top >= INFINITE
    tl.atomic_or(flag + tl.zeros_like(top), bad.to(tl.int32), mask=bad, sem="relaxed")
    return tl.where(bad, 0, top)


@triton.jit
def scale_of(top, SLICES: tl.constexpr):
    """The scales of finite maxima (as bits): max · f32(1/Q), 0 below 2⁻⁶⁴."""
    unit: tl.constexpr = UNIT_1 if SLICES == 1 else UNIT_2
    return tl.where(top >= ROW_FLOOR, from_bits(top) * unit, 0.0)


@triton.jit
def inverse_of(top, SLICES: tl.constexpr):
    """The multipliers to codes of finite maxima (as bits): Q ÷ max, 0 below 2⁻⁶⁴."""
    code: tl.constexpr = CODE_1 if SLICES == 1 else CODE_2
    live = top >= ROW_FLOOR
    return tl.where(live, tl.div_rn(code, from_bits(tl.where(live, top, 0x3F800000))), 0.0)


@triton.jit
def code_of(x, inverse):
    """rint(x · inverse) as i32; 0 where the inverse is 0, whatever x is."""
    return i32_of_small(tl.where(inverse > 0.0, x * inverse, 0.0))


@triton.jit
def high_of(code):
    """The high slice of two-slice codes, int8."""
    return ((code + 128) >> 8).to(tl.int8)


@triton.jit
def low_of(code):
    """The low slice of two-slice codes, int8."""
    return (code - (((code + 128) >> 8) << 8)).to(tl.int8)


@triton.jit
def sum_exponent(top, LOG_TERMS: tl.constexpr):
    """The k of a fixed sum of 2^LOG_TERMS terms at most, whose largest magnitude has these bits."""
    exponent = (top >> 23) - 127
    return tl.minimum(61 - LOG_TERMS - exponent, 100)


@triton.jit
def fixed_sum_rows(x, LOG_TERMS: tl.constexpr, flag):
    """Σ of each row of a tile f32[R, C] that holds whole rows, 0 where padded: exact in fixed point, rounded once."""
    top = checked_top(tl.max(magnitude(x), 1), flag)
    k = sum_exponent(top, LOG_TERMS)
    total = tl.sum(i64_of(tl.where(top[:, None] > 0, x, 0.0) * power_of_two(k)[:, None]), 1)
    return summed(total, k, top, flag)


@triton.jit
def summed(total, k, top, flag):
    """Σ of rows from their fixed-point totals i64 and exponents; beyond float32: the flag, and 0."""
    result = tl.where(top > 0, total.to(tl.float32) * power_of_two(-k), 0.0)
    bad = magnitude(result) >= INFINITE
    tl.atomic_or(flag + tl.zeros_like(top), bad.to(tl.int32), mask=bad, sem="relaxed")
    return tl.where(bad, 0.0, result)


@triton.jit
def fixed_point(x, factor, terms, limit):
    """(rint(x · factor) as i64, whether that is void): where |x| · terms ≥ limit or x is not finite it is 0."""
    good = absolute(x) * terms < limit
    return i64_of(tl.where(good, x, 0.0) * factor), good == 0


@triton.jit
def raise_flag(flag, bad):
    """Set the step's flag where `bad`, a tile of booleans, holds anywhere."""
    if tl.max(tl.ravel(bad).to(tl.int32), 0) > 0:
        tl.atomic_or(flag, 1, sem="relaxed")


def ceil_log2(n: int) -> int:
    """⌈log₂ n⌉ for n ≥ 1."""
    return (n - 1).bit_length()


def reciprocal(n: int) -> float:
    """f32(1/n), rounded once on the host."""
    return float(np.float32(1) / np.float32(n))


def inverse_root(n: int) -> float:
    """1 ÷ √n, each rounded to float32 on the host."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of the device."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the device."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)
