"""The output head: logits, cross-entropy with z-loss, and their gradients, from one log-normaliser.

Losses are summed as integers: the negative log-likelihoods in units of 2⁻²⁴, the squared log-normalisers in units of
2⁻²⁰. The target enters apart from the softmax, exactly: at a large vocabulary it would set the scale and erase the
rest.
"""

import numpy as np

from kernels.interface import GRADIENT_BITS, HEAD_LIMIT, LSE2_BITS, LSE2_LIMIT, SUM_LIMIT, Rows, Weight
from kernels.reference.constants import LN_2, LOG2_E
from kernels.reference.elementary import exp2, log2
from kernels.reference.numbers import F32, bf16, finite_max, fixed_point
from kernels.reference.products import add_sums, high_scale, product_f32, value
from kernels.reference.quantise import quantise, quantise_columns


def head(x: Rows, w: Weight, targets: np.ndarray, flag: np.ndarray) -> tuple[int, int]:
    """(Σ rint(nll·2²⁴), Σ rint(lse²·2²⁰)) over the unit's tokens, for targets i64[T]."""
    nll, lse2, _, _ = _losses(x, w, targets, flag)
    return nll, lse2


def head_backward(
    x: Rows, w: Weight, targets: np.ndarray, two_z: np.float32, sums: np.ndarray, flag: np.ndarray
) -> tuple[int, int, np.ndarray]:
    """head(), and the gradient of Σ (nll + z·lse²): (nll, lse2, dX bf16[T, D]); sums i64[V, D] gain the weight's.

    t = p·(1 + 2z·lse). dX contracts t·s_w, quantised by token, minus the target's row; dW contracts t·s_x, quantised by
    row over the unit's tokens, with the high slice of X, minus X at the target's row.
    """
    nll, lse2, p, lse = _losses(x, w, targets, flag)
    t = p * (F32(1) + two_z * lse)[:, None]
    by_token = quantise(t * w.scale[None, :], 2, flag)
    dx = value(by_token.hi, by_token.lo, np.ascontiguousarray(w.hi.T)) * by_token.scale[:, None]
    dx = dx - w.hi[targets].astype(np.float32) * w.scale[targets][:, None]
    by_row = quantise_columns(t * high_scale(x)[:, None], 2, flag)
    dw = value(by_row.hi, by_row.lo, np.ascontiguousarray(x.hi.T)) * by_row.scale[:, None]
    add_sums(sums, dw, HEAD_LIMIT, flag)
    np.subtract.at(sums, targets, fixed_point(_dequantised(x), GRADIENT_BITS, flag, len(targets), HEAD_LIMIT))
    return nll, lse2, bf16(dx)


def _losses(x: Rows, w: Weight, targets: np.ndarray, flag: np.ndarray) -> tuple[int, int, np.ndarray, np.ndarray]:
    """(nll sum, lse² sum, p f32[T, V], lse f32[T])."""
    logits = product_f32(x, w)
    live = finite_max(logits, 1, flag) > 0
    logits = np.where(live[:, None], logits, F32(0))
    m: np.ndarray = np.max(logits, axis=1)
    e = exp2((logits - m[:, None]) * LOG2_E)
    counts = np.rint(e * F32(2.0**40)).astype(np.int64)
    z = counts.sum(axis=1, dtype=np.int64).astype(np.float32)
    lse = m + (log2(z) - F32(40)) * LN_2
    nll = lse - logits[np.arange(len(targets)), targets]
    nll_sum = np.sum(fixed_point(nll, GRADIENT_BITS, flag, len(targets), SUM_LIMIT), dtype=np.int64)
    lse2_sum = np.sum(fixed_point(lse * lse, LSE2_BITS, flag, len(targets), LSE2_LIMIT), dtype=np.int64)
    return int(nll_sum), int(lse2_sum), e * (F32(2.0**40) / z)[:, None], lse


def _dequantised(x: Rows) -> np.ndarray:
    code = x.hi.astype(np.int32)
    if x.lo is not None:
        code = code * np.int32(256) + x.lo.astype(np.int32)
    return code.astype(np.float32) * x.scale[:, None]
