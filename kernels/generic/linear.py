"""Linear layers, forward and backward, as integer products with scales."""

from torch import Tensor

from kernels.generic.numbers import bf16, f32, fixed_point
from kernels.generic.products import transposed, value
from kernels.generic.quantise import quantise, quantise_columns
from kernels.interface import GRADIENT_BITS, SUM_LIMIT, GradientSlices, Part, Rows, Weight


def product_f32(x: Rows, w: Weight) -> Tensor:
    """X Wᵀ in f32[T, O], scaled by the token's scale, then by the row's."""
    return value(x.hi, x.lo, w.hi).mul_(x.scale[:, None]).mul_(w.scale[None, :])


def project(x: Rows, w: Weight) -> Tensor:
    """X Wᵀ as bf16[T, O]."""
    return bf16(product_f32(x, w))


def project_add(x: Rows, w: Weight, residual: Tensor) -> Tensor:
    """residual + X Wᵀ as bf16[T, O]; the product itself is not rounded to bf16."""
    return bf16(f32(residual) + product_f32(x, w))


def linear_backward(x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: Tensor) -> Tensor:
    """dX bf16[T, I] = (dX₁ + dX₂) + dX₃ of the weights that read the same rows; each part's sums gain rint(dW·2²⁴)."""
    hi_scale, x_columns = high_scale(x), transposed(x.hi)
    total: Tensor | None = None
    for dy, weight, sums in parts:
        gradient = f32(dy)
        by_token = quantise(gradient * weight.scale[None, :], slices.input, flag)
        part = value(by_token.hi, by_token.lo, weight.layout).mul_(by_token.scale[:, None])
        total = part if total is None else total + part
        by_channel = quantise_columns(gradient * hi_scale[:, None], slices.weight, flag)
        add_sums(sums, value(by_channel.hi, by_channel.lo, x_columns).mul_(by_channel.scale[:, None]), SUM_LIMIT, flag)
    assert total is not None
    return bf16(total)


def high_scale(x: Rows) -> Tensor:
    """The scale of the high slice alone."""
    return x.scale if x.lo is None else x.scale * 256.0


def add_sums(sums: Tensor, values: Tensor, limit: int, flag: Tensor) -> None:
    """sums += rint(values · 2²⁴); a value of 2^limit or more, or one not finite, raises the flag and counts as 0."""
    sums += fixed_point(values, GRADIENT_BITS, flag, 1, limit)
