"""Quantisers of whole arrays, and fixed-point sums of rows. Definitions: kernels/reference/quantise.py."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.exclusive import exclusive
from kernels.cpu.layers import BLOCK, empty_codes, reciprocal, rows_of
from kernels.cpu.numeric import (
    F0,
    F1,
    OPTIONS,
    PARALLEL,
    ROW_FLOOR,
    absolute,
    all_done,
    checked_top,
    choose,
    f32_of_bf16,
    fixed_sum_row,
    i8_of_i32,
    i32_of_f32,
    inverse_of,
    quantise_row,
    rint,
    row_top,
    scale_of,
)
from kernels.interface import Rows, Weight

LSQ_STEP = np.float32(float.fromhex("0x1.6b7612p-3"))  # 2 / √127, rounded once
HIGH, LOW = np.float32(127), np.float32(-127)
RULES = ("max", "lsq")


@exclusive
def quantise_rows(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
    """Rows of x bf16[R, C]."""
    hi, lo = empty_codes(x.shape[0], x.shape[1], slices)
    scale = np.empty(len(x), np.float32)
    _quantise_rows(x, slices, hi, lo, scale, flag)
    return rows_of(hi, lo, scale)


@njit(**PARALLEL)
def _quantise_rows(x, slices, hi, lo, scale, flag):
    rows, width = x.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for t in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            for j in range(width):
                work[j] = f32_of_bf16(x[t, j])
            scale[t] = quantise_row(work, slices, hi[t], lo[t], flag)
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@exclusive
def quantise_weight(w: np.ndarray, rule: str, flag: np.ndarray) -> Weight:
    """A weight f32[O, I] as int8 rows. Rule "max": the row's maximum becomes 127; "lsq": the step is 2·mean|w|/√127."""
    if rule not in RULES:
        raise ValueError(f"weight scale rule {rule!r}: it is one of {RULES}")
    hi, scale = np.empty(w.shape, np.int8), np.empty(len(w), np.float32)
    _quantise_weight(w, rule == "lsq", reciprocal(w.shape[1]), hi, scale, flag)
    return Weight(hi, scale)


@njit(**PARALLEL)
def _quantise_weight(w, lsq, mean, hi, scale, flag):
    rows, width = w.shape
    done = 0
    for block in prange((rows + BLOCK - 1) // BLOCK):
        work = np.empty(width, np.float32)
        for o in range(block * BLOCK, min(rows, (block + 1) * BLOCK)):
            top = checked_top(row_top(w[o]), flag)
            if lsq:
                scale[o] = _lsq_scale(w[o], top, mean, work, flag)
                inverse = F1 / scale[o] if scale[o] > F0 else F0
            else:
                scale[o], inverse = scale_of(top, 1), inverse_of(top, 1)
            _clipped_codes(w[o], inverse, hi[o])
        done += 1
    all_done(done, (rows + BLOCK - 1) // BLOCK)


@njit(**OPTIONS)
def _lsq_scale(row, top, mean, work, flag):
    for j in range(row.size):
        work[j] = absolute(row[j])
    step = (fixed_sum_row(work, flag) * mean) * LSQ_STEP
    return step if top >= ROW_FLOOR else F0


@njit(**OPTIONS)
def _clipped_codes(row, inverse, hi):
    for j in range(row.size):
        code = rint(choose(inverse > F0, row[j] * inverse, F0))
        code = choose(code > HIGH, HIGH, choose(code < LOW, LOW, code))
        hi[j] = i8_of_i32(i32_of_f32(code))


@exclusive
def fixed_sum(x: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """The sum of each row of x f32[R, C], as f32[R]: exact in a fixed point of the row's maximum, rounded once."""
    out = np.empty(len(x), np.float32)
    _fixed_sum(x, out, flag)
    return out


@njit(**PARALLEL)
def _fixed_sum(x, out, flag):
    for i in prange(x.shape[0]):
        out[i] = fixed_sum_row(x[i], flag)
