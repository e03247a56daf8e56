"""The output head's three integer products, each with what follows it in its epilogue; head.py launches them.

Offsets are 64 bits wide: T · V passes 2³¹.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.nvidia.head_kernels import PART_BOUND
from kernels.nvidia.numbers import (
    GRADIENT_UNIT,
    INFINITE,
    LOWEST,
    bf16,
    fixed_point,
    magnitude,
    order_key,
    raise_flag,
)
from kernels.nvidia.products import tile_of, value

NOT_FINITE = tl.constexpr(0x7FFFFFFF)  # the order key of a token with a logit that is not finite


@triton.jit
def logits_kernel(
    hi, lo, row_scale, w, w_scale, logits, peak, tokens, vocab,
    INNER: tl.constexpr, SLICES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """logits f32[T, V] = (value·s_x)·s_w; peak i32[T] takes in each token's largest order key, or NOT_FINITE."""
    first, other = tile_of(tokens, vocab, GROUP, M, N)
    t, v = first + tl.arange(0, M), other + tl.arange(0, N)
    x = value(hi, lo, w, first, other, tokens, vocab, INNER, INNER, SLICES, M, N, K)
    x = x * tl.load(row_scale + t, mask=t < tokens, other=0.0)[:, None]
    x = x * tl.load(w_scale + v, mask=v < vocab, other=0.0)[None, :]
    inside = (t < tokens)[:, None] & (v < vocab)[None, :]
    tl.store(logits + (t.to(tl.int64)[:, None] * vocab + v[None, :]), x, mask=inside)
    key = tl.where(magnitude(x) >= INFINITE, NOT_FINITE, order_key(x))
    key = tl.max(tl.where((v < vocab)[None, :], key, LOWEST), 1)
    tl.atomic_max(peak + t, key, mask=t < tokens, sem="relaxed")


@triton.jit
def input_kernel(
    hi, lo, scale, right, w, w_scale, targets, dx, tokens, width,
    INNER: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dX bf16[T, D] = value·scale − ŵ of the target, for codes int8[T, V] and the weight's layout int8[D, V]."""
    first, other = tile_of(tokens, width, GROUP, M, N)
    t, d = first + tl.arange(0, M), other + tl.arange(0, N)
    x = value(hi, lo, right, first, other, tokens, width, INNER, INNER, 2, M, N, K)
    x = x * tl.load(scale + t, mask=t < tokens, other=0.0)[:, None]
    inside = (t < tokens)[:, None] & (d < width)[None, :]
    y = tl.load(targets + t, mask=t < tokens, other=0)
    target = tl.load(w + (y[:, None] * width + d[None, :]), mask=inside, other=0).to(tl.float32)
    x = x - target * tl.load(w_scale + y)[:, None]
    tl.store(dx + (t.to(tl.int64)[:, None] * width + d[None, :]), bf16(x), mask=inside)


@triton.jit
def weight_kernel(
    hi, lo, scale, right, sums, flag, vocab, width,
    INNER: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """sums i64[V, D] gain rint(value·scale·2²⁴), for codes int8[V, T] and the transposed high slice int8[D, T]."""
    first, other = tile_of(vocab, width, GROUP, M, N)
    v, d = first + tl.arange(0, M), other + tl.arange(0, N)
    x = value(hi, lo, right, first, other, vocab, width, INNER, INNER, 2, M, N, K)
    x = x * tl.load(scale + v, mask=v < vocab, other=0.0)[:, None]
    points, bad = fixed_point(x, GRADIENT_UNIT, 1.0, PART_BOUND)
    inside = (v < vocab)[:, None] & (d < width)[None, :]
    raise_flag(flag, bad & inside)
    at = sums + (v.to(tl.int64)[:, None] * width + d[None, :])
    tl.store(at, tl.load(at, mask=inside, other=0) + points, mask=inside)
