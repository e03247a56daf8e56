"""The output head's sweeps over its logits, and its smaller kernels; head.py launches them and says in which order.

Logits are held once, f32[T, V]; every sweep makes exponentials from them anew, which costs no more than storing them
would. Offsets are 64 bits wide: T · V passes 2³¹.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.interface import HEAD_LIMIT, LSE2_BITS, LSE2_LIMIT, SUM_LIMIT
from kernels.nvidia.codes import store_codes, store_slices
from kernels.nvidia.elementary import LN_2, LOG2_E, exp2_down, log2
from kernels.nvidia.numbers import (
    GRADIENT_UNIT,
    INFINITE,
    WHOLE,
    checked_top,
    code_of,
    fixed_point,
    from_bits,
    inverse_of,
    key_bits,
    magnitude,
    raise_flag,
    scale_of,
)

MASS_BITS, MASS_UNIT = tl.constexpr(40.0), tl.constexpr(2.0**40)
LSE2_UNIT = tl.constexpr(2.0**LSE2_BITS)
LOSS_BOUND, SQUARE_BOUND = tl.constexpr(2.0**SUM_LIMIT), tl.constexpr(2.0**LSE2_LIMIT)
PART_BOUND = tl.constexpr(2.0**HEAD_LIMIT)


@triton.jit
def losses_kernel(
    logits, peak, targets, maximum, inverse, factor, losses, two_z, terms, vocab, flag,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program: its maximum, 2⁴⁰ ÷ Σ rint(e·2⁴⁰) and 1 + 2z·lse; losses i64[2] gain its nll and lse².

    Where a logit is not finite the flag is raised, and all of the token's become 0, in memory too.
    """
    t = tl.program_id(0)
    row = logits + t.to(tl.int64) * vocab
    key = tl.load(peak + t)
    if key >= INFINITE:
        tl.atomic_or(flag, 1, sem="relaxed")
        for step in range(STEPS):
            c = step * BLOCK + tl.arange(0, BLOCK)
            tl.store(row + c, tl.zeros((BLOCK,), tl.float32), mask=c < vocab)
        tl.debug_barrier()  # the loads below may be other threads'
    m = from_bits(tl.where(key >= INFINITE, 0, key_bits(key)))
    counts = tl.zeros((BLOCK,), tl.int64)
    for step in range(STEPS):
        c = step * BLOCK + tl.arange(0, BLOCK)
        e = exp2_down((tl.load(row + c, mask=c < vocab, other=-float("inf")) - m) * LOG2_E) * MASS_UNIT
        counts += tl.where(e < WHOLE, (e + WHOLE) - WHOLE, e).to(tl.int64)  # rint: e is never negative
    mass = tl.sum(counts, 0, dtype=tl.int64).to(tl.float32)
    lse = m + (log2(mass) - MASS_BITS) * LN_2
    nll, nll_bad = fixed_point(lse - tl.load(row + tl.load(targets + t)), GRADIENT_UNIT, terms, LOSS_BOUND)
    square, square_bad = fixed_point(lse * lse, LSE2_UNIT, terms, SQUARE_BOUND)
    if nll_bad | square_bad:
        tl.atomic_or(flag, 1, sem="relaxed")
    tl.atomic_add(losses, nll, sem="relaxed")
    tl.atomic_add(losses + 1, square, sem="relaxed")
    tl.store(maximum + t, m)
    tl.store(inverse + t, tl.div_rn(MASS_UNIT, mass))
    tl.store(factor + t, 1.0 + two_z * lse)


@triton.jit
def gradient_tile(logits, maximum, inverse, factor, t, v, tokens, vocab, stride):
    """p·(1 + 2z·lse) = (e·inverse)·factor as f32[R, C] of tokens t and columns v; 0 outside."""
    inside = (t < tokens)[:, None] & (v < vocab)[None, :]
    x = tl.load(logits + (t.to(tl.int64)[:, None] * stride + v[None, :]), mask=inside, other=-float("inf"))
    e = exp2_down((x - tl.load(maximum + t, mask=t < tokens, other=0.0)[:, None]) * LOG2_E)
    e = e * tl.load(inverse + t, mask=t < tokens, other=0.0)[:, None]
    return e * tl.load(factor + t, mask=t < tokens, other=0.0)[:, None]


@triton.jit
def tops_kernel(
    logits, maximum, inverse, factor, x_scale, w_scale, tops, tokens, vocab,
    HIGH: tl.constexpr, STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """tops i32[T + V] takes in the magnitudes' bits: of t·s_w by token, then of t·s_x(hi) by column."""
    v = tl.program_id(0) * C + tl.arange(0, C)
    right = tl.load(w_scale + v, mask=v < vocab, other=0.0)
    column = tl.zeros((R, C), tl.int32)
    for step in range(STEPS):
        t = (tl.program_id(1) * STEPS + step) * R + tl.arange(0, R)
        gradient = gradient_tile(logits, maximum, inverse, factor, t, v, tokens, vocab, vocab)
        row = tl.max(magnitude(gradient * right[None, :]), 1)
        tl.atomic_max(tops + t, row, mask=t < tokens, sem="relaxed")
        left = tl.load(x_scale + t, mask=t < tokens, other=0.0) * HIGH
        column = tl.maximum(column, magnitude(gradient * left[:, None]))
    tl.atomic_max(tops + tokens + v, tl.max(column, 0), mask=v < vocab, sem="relaxed")


@triton.jit
def scales_kernel(tops, scale, inverse, count, flag, BLOCK: tl.constexpr):
    """Two-slice scales and multipliers to codes of maxima i32[count]; the flag where one is not finite."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = checked_top(tl.load(tops + i, mask=i < count, other=0), flag)
    tl.store(scale + i, scale_of(top, 2), mask=i < count)
    tl.store(inverse + i, inverse_of(top, 2), mask=i < count)


@triton.jit
def codes_kernel(
    logits, maximum, inverse, factor, x_scale, w_scale, token_inverse, column_inverse,
    token_hi, token_lo, column_hi, column_lo, tokens, vocab, stride,
    HIGH: tl.constexpr, BY_TOKEN: tl.constexpr, BY_COLUMN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes of t·s_w, int8[tokens, vocab], and of t·s_x(hi) transposed, int8[vocab, tokens], from one reading."""
    t = tl.program_id(1) * R + tl.arange(0, R)
    v = tl.program_id(0) * C + tl.arange(0, C)
    gradient = gradient_tile(logits, maximum, inverse, factor, t, v, tokens, vocab, stride)
    inside = (t < tokens)[:, None] & (v < vocab)[None, :]
    if BY_TOKEN:
        right = tl.load(w_scale + v, mask=v < vocab, other=0.0)
        code = code_of(gradient * right[None, :], tl.load(token_inverse + t, mask=t < tokens, other=0.0)[:, None])
        at = t.to(tl.int64)[:, None] * vocab + v[None, :]
        store_codes(code, token_hi, token_lo, at, inside, 2)
    if BY_COLUMN:
        left = tl.load(x_scale + t, mask=t < tokens, other=0.0) * HIGH
        code = code_of(gradient * left[:, None], tl.load(column_inverse + v, mask=v < vocab, other=0.0)[None, :])
        at = v.to(tl.int64)[:, None] * tokens + t[None, :]
        code = (code + 128).to(tl.int16)  # 16 bits are what the processor itself transposes
        store_slices(column_hi, column_lo, at, code.T, inside.T)


@triton.jit
def target_kernel(
    hi, lo, scale, targets, sums, terms, width, flag, SLICES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sums i64[V, D] lose rint(x̂·2²⁴) in the row of each token's target."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(hi + t * width + d, mask=d < width, other=0).to(tl.int32)
    if SLICES == 2:
        code = code * 256 + tl.load(lo + t * width + d, mask=d < width, other=0).to(tl.int32)
    points, bad = fixed_point(code.to(tl.float32) * tl.load(scale + t), GRADIENT_UNIT, terms, PART_BOUND)
    raise_flag(flag, bad & (d < width))
    tl.atomic_add(sums + tl.load(targets + t) * width + d, -points, mask=d < width, sem="relaxed")
