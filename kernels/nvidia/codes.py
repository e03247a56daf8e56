"""Stores of codes in one or two slices, as they are and transposed. Definition: kernels/reference/quantise.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.nvidia.numbers import high_of, low_of


@triton.jit
def store_codes(code, hi, lo, at, inside, SLICES: tl.constexpr):
    """Store a tile of codes i32, in one slice or two; `lo` is read by nobody where there is one."""
    if SLICES == 1:
        tl.store(hi + at, code.to(tl.int8), mask=inside)
    else:
        tl.store(hi + at, high_of(code), mask=inside)
        tl.store(lo + at, low_of(code), mask=inside)


@triton.jit
def store_slices(hi, lo, at, raised, inside):
    """Store both slices of transposed codes, given as code + 128, by one store in a loop: of two stores the compiler
    makes two transpositions, and makes the codes again for the second."""
    for low in range(2):
        byte = (raised >> (8 - 8 * low)) ^ (128 * low)
        tl.store(tl.where(low == 0, hi, lo) + at, byte.to(tl.int8), mask=inside)
