"""The output head: logits, cross-entropy with z-loss, and their gradients, from one log-normaliser.

Logits are made twice and never all at once: for some tokens with the whole vocabulary (losses, dX), then for
some of the vocabulary with all tokens (dW, whose scale is over the unit's tokens).
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kernels.generic.elementary import LN_2, LOG2_E, exp2, log2
from kernels.generic.exact import divide, f32_of_i64, i64_of_f32
from kernels.generic.linear import add_sums, high_scale, product_f32
from kernels.generic.numbers import add_rows, bf16, constant, finite_max, fixed_point, row_max
from kernels.generic.products import transposed, value
from kernels.generic.quantise import quantise, quantise_columns
from kernels.interface import GRADIENT_BITS, HEAD_LIMIT, LSE2_BITS, LSE2_LIMIT, SUM_LIMIT, Rows, Weight

CHUNK = 1 << 22  # logits at a time: bounds the working memory


def head(x: Rows, w: Weight, targets: Tensor, flag: Tensor) -> tuple[int, int]:
    """(Σ rint(nll·2²⁴), Σ rint(lse²·2²⁰)) over the unit's tokens, for targets i64[T]."""
    sums = torch.zeros(2, dtype=torch.int64, device=targets.device)
    for span in _spans(len(targets), len(w.scale)):
        _add_losses(sums, _logits(_some(x, span), w, flag)[0], targets[span], len(targets), flag)
    return _integers(sums)


def head_backward(
    x: Rows, w: Weight, targets: Tensor, two_z: np.float32, sums: Tensor, flag: Tensor
) -> tuple[int, int, Tensor]:
    """head(), and the gradient of Σ (nll + z·lse²): (nll, lse2, dX bf16[T, D]); sums i64[V, D] gain the weight's."""
    tokens = len(targets)
    losses = torch.zeros(2, dtype=torch.int64, device=targets.device)
    dx = torch.empty(tokens, x.hi.shape[1], dtype=torch.int16, device=targets.device)
    rows = torch.empty(4, tokens, dtype=torch.float32, device=targets.device)  # live, maximum, 1 ÷ z, 1 + 2z·lse
    for span in _spans(tokens, len(w.scale)):
        logits, live = _logits(_some(x, span), w, flag)
        m, z, lse = _add_losses(losses, logits, targets[span], tokens, flag)
        rows[:, span] = torch.stack((live, m, divide(constant(2.0**40, z), z), lse * float(two_z) + 1.0))
        t = _gradient(logits, rows[:, span])
        by_token = quantise(t * w.scale[None, :], 2, flag)
        part = value(by_token.hi, by_token.lo, w.layout) * by_token.scale[:, None]
        right = w.hi.index_select(0, targets[span]).to(torch.float32) * w.scale.index_select(0, targets[span])[:, None]
        dx[span] = bf16(part - right)
    _weight_gradient(x, w, rows, sums, flag)
    add_rows(sums, targets, -fixed_point(_dequantised(x), GRADIENT_BITS, flag, tokens, HEAD_LIMIT))
    return *_integers(losses), dx


def _weight_gradient(x: Rows, w: Weight, rows: Tensor, sums: Tensor, flag: Tensor) -> None:
    """Add the gradient of the logits' softmax part to sums, some of the vocabulary at a time."""
    scale, x_columns = high_scale(x), transposed(x.hi)
    for span in _spans(len(w.scale), len(x.scale)):
        logits = torch.where(rows[0][:, None] > 0, product_f32(x, Weight(w.hi[span], w.scale[span])), 0.0)
        by_row = quantise_columns(_gradient(logits, rows) * scale[:, None], 2, flag)
        add_sums(sums[span], value(by_row.hi, by_row.lo, x_columns) * by_row.scale[:, None], HEAD_LIMIT, flag)


def _logits(x: Rows, w: Weight, flag: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, which rows are finite and not all zero: f32 1 or 0); the other rows are 0."""
    logits = product_f32(x, w)
    live = finite_max(logits, flag) > 0
    return torch.where(live[:, None], logits, 0.0), live.to(torch.float32)


def _add_losses(
    sums: Tensor, logits: Tensor, targets: Tensor, terms: int, flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the losses of some tokens to sums; (maximum, normaliser in units of 2⁻⁴⁰, its logarithm) of each."""
    m = row_max(logits)
    e = exp2((logits - m[:, None]) * LOG2_E)
    z = f32_of_i64(torch.sum(i64_of_f32(torch.round(e * 2.0**40)), 1, dtype=torch.int64))
    lse = m + (log2(z) - 40.0) * LN_2
    nll = lse - logits.gather(1, targets[:, None])[:, 0]
    nll_points = fixed_point(nll, GRADIENT_BITS, flag, terms, SUM_LIMIT)
    lse2_points = fixed_point(lse * lse, LSE2_BITS, flag, terms, LSE2_LIMIT)
    sums += torch.sum(torch.stack((nll_points, lse2_points)), 1, dtype=torch.int64)
    return m, z, lse


def _gradient(logits: Tensor, rows: Tensor) -> Tensor:
    """p·(1 + 2z·lse)."""
    _, m, inverse, factor = rows
    return (exp2((logits - m[:, None]) * LOG2_E) * inverse[:, None]) * factor[:, None]


def _integers(sums: Tensor) -> tuple[int, int]:
    nll, lse2 = sums.tolist()
    return int(nll), int(lse2)


def _some(x: Rows, span: slice) -> Rows:
    return Rows(x.hi[span], None if x.lo is None else x.lo[span], x.scale[span])


def _spans(count: int, width: int) -> Iterator[slice]:
    size = max(32, CHUNK // width)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _dequantised(x: Rows) -> Tensor:
    code = x.hi.to(torch.int32)
    if x.lo is not None:
        code = (code << 8) + x.lo.to(torch.int32)
    return code.to(torch.float32) * x.scale[:, None]
