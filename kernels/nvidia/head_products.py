"""The output head's three integer products, each with what follows it in its epilogue; head.py launches them.

Both operands' inner index is contiguous, as Hopper's tensor cores want int8. The two slices of the left side meet one
tile of the right, and both int32 sums stay in registers. Offsets are 64 bits wide: T · V passes 2³¹.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.interface import HEAD_LIMIT
from kernels.nvidia.numbers import INFINITE, LOWEST, bf16, fixed_point, magnitude, order_key, raise_flag

NOT_FINITE = tl.constexpr(0x7FFFFFFF)  # the order key of a token with a logit that is not finite
GRADIENT_UNIT, PART_BOUND = tl.constexpr(2.0**24), tl.constexpr(2.0**HEAD_LIMIT)


@triton.jit
def tile_of(rows, columns, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """(first row, first column) of this program's tile: GROUP blocks of rows take turns at a block of columns, so that
    the second cache keeps both operands."""
    down, across = tl.cdiv(rows, M), tl.cdiv(columns, N)
    pid = tl.program_id(0)
    group = pid // (GROUP * across)
    within = pid - group * (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + within % height) * M, (within // height) * N


@triton.jit
def two_slices(
    hi, lo, right, first, other, rows, columns, inner,
    SLICES: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """f32(hi·right)·2⁸ + f32(lo·right), or f32(hi·right), as f32[M, N]: from row `first` of hi and lo int8[rows, inner]
    and row `other` of right int8[columns, inner] on.

    Both slices are one tile of 2M rows, for the compiler waits after every dot of integers. Eight rows of hi and the
    same of lo take turns, so that each pair of sums ends in one thread.
    """
    k = tl.arange(0, K)
    i = tl.arange(0, 2 * M)
    row = tl.minimum(first + i // 16 * 8 + i % 8, rows - 1).to(tl.int64)
    left = tl.where((i % 16 < 8)[:, None], hi, lo) + (row[:, None] * inner + k[None, :])
    column = tl.minimum(other + tl.arange(0, N), columns - 1)
    right = right + (column.to(tl.int64)[:, None] * inner + k[None, :])
    total = tl.zeros((2 * M, N), tl.int32)
    for step in range(STEPS):
        if EVEN:
            total = tl.dot(tl.load(left), tl.load(right).T, total, out_dtype=tl.int32)
        else:
            inside = k[None, :] < inner - step * K
            b = tl.load(right, mask=inside, other=0)
            total = tl.dot(tl.load(left, mask=inside, other=0), b.T, total, out_dtype=tl.int32)
        left += K
        right += K
    high, low = tl.split(total.to(tl.float32).reshape(M // 8, 2, 8, N).permute(0, 2, 3, 1))
    value = high * 256.0 + low if SLICES == 2 else high
    return value.reshape(M, N)


@triton.jit
def logits_kernel(
    hi, lo, row_scale, w, w_scale, logits, peak, tokens, vocab, inner,
    SLICES: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """logits f32[T, V] = (value·s_x)·s_w; peak i32[T] takes in each token's largest order key, or NOT_FINITE."""
    first, other = tile_of(tokens, vocab, GROUP, M, N)
    t, v = first + tl.arange(0, M), other + tl.arange(0, N)
    x = two_slices(hi, lo, w, first, other, tokens, vocab, inner, SLICES, STEPS, EVEN, M, N, K)
    x = x * tl.load(row_scale + t, mask=t < tokens, other=0.0)[:, None]
    x = x * tl.load(w_scale + v, mask=v < vocab, other=0.0)[None, :]
    inside = (t < tokens)[:, None] & (v < vocab)[None, :]
    tl.store(logits + (t.to(tl.int64)[:, None] * vocab + v[None, :]), x, mask=inside)
    key = tl.where(magnitude(x) >= INFINITE, NOT_FINITE, order_key(x))
    key = tl.max(tl.where((v < vocab)[None, :], key, LOWEST), 1)
    tl.atomic_max(peak + t, key, mask=t < tokens, sem="relaxed")


@triton.jit
def input_kernel(
    hi, lo, scale, right, w, w_scale, targets, dx, tokens, width, vocab,
    STEPS: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dX bf16[T, D] = value·scale − ŵ of the target, for codes int8[T, V] and the weight's layout int8[D, V]."""
    first, other = tile_of(tokens, width, GROUP, M, N)
    t, d = first + tl.arange(0, M), other + tl.arange(0, N)
    x = two_slices(hi, lo, right, first, other, tokens, width, vocab, 2, STEPS, EVEN, M, N, K)
    x = x * tl.load(scale + t, mask=t < tokens, other=0.0)[:, None]
    inside = (t < tokens)[:, None] & (d < width)[None, :]
    y = tl.load(targets + t, mask=t < tokens, other=0)
    target = tl.load(w + (y[:, None] * width + d[None, :]), mask=inside, other=0).to(tl.float32)
    x = x - target * tl.load(w_scale + y)[:, None]
    tl.store(dx + (t.to(tl.int64)[:, None] * width + d[None, :]), bf16(x), mask=inside)


@triton.jit
def weight_kernel(
    hi, lo, scale, right, sums, flag, vocab, width, tokens,
    STEPS: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """sums i64[V, D] gain rint(value·scale·2²⁴), for codes int8[V, T] and the transposed high slice int8[D, T]."""
    first, other = tile_of(vocab, width, GROUP, M, N)
    v, d = first + tl.arange(0, M), other + tl.arange(0, N)
    x = two_slices(hi, lo, right, first, other, vocab, width, tokens, 2, STEPS, EVEN, M, N, K)
    x = x * tl.load(scale + v, mask=v < vocab, other=0.0)[:, None]
    points, bad = fixed_point(x, GRADIENT_UNIT, 1.0, PART_BOUND)
    inside = (v < vocab)[:, None] & (d < width)[None, :]
    raise_flag(flag, bad & inside)
    at = sums + (v.to(tl.int64)[:, None] * width + d[None, :])
    tl.store(at, tl.load(at, mask=inside, other=0) + points, mask=inside)
