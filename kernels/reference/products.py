"""Integer products, and their values as f32.

int8 × int8 in int32 is exact in any order. Here it goes through float64, whose sums are exact below 2⁵³: every term is
at most 128², every contraction at most 133,144 terms.
"""

import numpy as np

from kernels.interface import GRADIENT_BITS, SUM_LIMIT, GradientSlices, Part, Rows, Weight
from kernels.reference.numbers import F32, bf16, f32, fixed_point
from kernels.reference.quantise import quantise, quantise_columns


def integer_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a int8[R, C] times the transpose of b int8[S, C], as int32[R, S]."""
    return (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int32)


def value(hi: np.ndarray, lo: np.ndarray | None, right: np.ndarray) -> np.ndarray:
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right) for two slices."""
    product = integer_product(hi, right).astype(np.float32)
    if lo is None:
        return product
    return product * F32(256) + integer_product(lo, right).astype(np.float32)


def product_f32(x: Rows, w: Weight) -> np.ndarray:
    """X Wᵀ in f32[T, O], scaled by the token's scale, then by the row's."""
    return (value(x.hi, x.lo, w.hi) * x.scale[:, None]) * w.scale[None, :]


def project(x: Rows, w: Weight) -> np.ndarray:
    """X Wᵀ as bf16[T, O]."""
    return bf16(product_f32(x, w))


def project_add(x: Rows, w: Weight, residual: np.ndarray) -> np.ndarray:
    """residual + X Wᵀ as bf16[T, O]; the product itself is not rounded to bf16."""
    return bf16(f32(residual) + product_f32(x, w))


def linear_backward(x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: np.ndarray) -> np.ndarray:
    """Gradients of Y = X Wᵀ for one or more weights that read the same rows.

    dX = bf16((dX₁ + dX₂) + dX₃), each from dY·scale_w quantised by token. Each part's sums gain rint(dW·2²⁴), dW from
    dY·scale_x quantised by channel over the unit's tokens, times the high slice of X. The quantisers pass gradients
    straight through.
    """
    hi_scale = high_scale(x)
    dx: np.ndarray | None = None
    for dy, weight, sums in parts:
        gradient = f32(dy)
        by_token = quantise(gradient * weight.scale[None, :], slices.input, flag)
        part = value(by_token.hi, by_token.lo, np.ascontiguousarray(weight.hi.T)) * by_token.scale[:, None]
        dx = part if dx is None else dx + part
        by_channel = quantise_columns(gradient * hi_scale[:, None], slices.weight, flag)
        dw = value(by_channel.hi, by_channel.lo, np.ascontiguousarray(x.hi.T)) * by_channel.scale[:, None]
        add_sums(sums, dw, SUM_LIMIT, flag)
    assert dx is not None
    return bf16(dx)


def high_scale(x: Rows) -> np.ndarray:
    """The scale of the high slice alone."""
    return x.scale if x.lo is None else x.scale * F32(256)


def add_sums(sums: np.ndarray, values: np.ndarray, limit: int, flag: np.ndarray) -> None:
    """sums += rint(values · 2²⁴); a value of 2^limit or more, or one not finite, raises the flag and counts as 0."""
    sums += fixed_point(values, GRADIENT_BITS, flag, 1, limit)
