"""The output head: logits, cross-entropy with z-loss, and their gradients. Definition: kernels/reference/head.py.

One unit's logits are held, f32[T, V], and read three times: for each token's mass and losses, for the maxima of rows
and columns, for the codes of both. Maxima and losses join across programs by integer atomics, so neither their order
nor the sizes of tiles and chunks below reach a bit. Nothing waits for the device: losses come back as its tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton import cdiv

from kernels.interface import Rows, Weight
from kernels.nvidia.head_kernels import codes_kernel, losses_kernel, scales_kernel, target_kernel, tops_kernel
from kernels.nvidia.head_products import input_kernel, logits_kernel, weight_kernel
from kernels.nvidia.numbers import LOWEST, empty, launch, zeros
from kernels.nvidia.products import low_slice, slice_count
from kernels.nvidia.transpose import transposed

BUDGET = 24 << 30  # bytes of logits and all their codes at once; beyond it codes are made in parts
PART = 4 << 30  # bytes of codes in a part
LOSS_LOGITS = 1 << 28  # logits at a time where no gradient follows
WHOLE = 128  # chunks are multiples of it

LOGITS: dict[str, Any] = {"GROUP": 32, "M": 64, "N": 128, "K": 128, "num_warps": 4, "num_stages": 3}
INPUT: dict[str, Any] = {"GROUP": 8, "M": 64, "N": 256, "K": 128, "num_warps": 8, "num_stages": 4}
WEIGHT: dict[str, Any] = {"GROUP": 16, "M": 64, "N": 256, "K": 128, "num_warps": 8, "num_stages": 3}
LOSSES: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8}
TOPS: dict[str, Any] = {"STEPS": 16, "R": 16, "C": 512, "num_warps": 8}
SCALES: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4}
CODES: dict[str, Any] = {"R": 128, "C": 64, "num_warps": 8}
TARGET: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4}


class Softmax(NamedTuple):
    """The logits of a unit, f32[T, V], and what the first sweep over them learns about each token, f32[T]."""

    logits: Tensor  # a token's are all 0 where one is not finite
    maximum: Tensor
    inverse: Tensor  # 2⁴⁰ ÷ the sum of exponentials in units of 2⁻⁴⁰
    factor: Tensor  # 1 + 2z·lse

    def cut(self, tokens: slice, columns: slice) -> Softmax:
        """Some tokens and some of the vocabulary."""
        return Softmax(self.logits[tokens, columns], self.maximum[tokens], self.inverse[tokens], self.factor[tokens])


def head(x: Rows, w: Weight, targets: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ rint(nll·2²⁴), Σ rint(lse²·2²⁰)), 0-dim i64, over the unit's tokens, for targets i64[T]."""
    losses = zeros((2,), torch.int64)
    for span in _spans(len(targets), LOSS_LOGITS // len(w.scale)):
        part = Rows(x.hi[span], None if x.lo is None else x.lo[span], x.scale[span])
        _softmax(part, w, targets[span], np.float32(0), len(targets), losses, flag)
    return losses[0], losses[1]


def head_backward(
    x: Rows, w: Weight, targets: Tensor, two_z: np.float32, sums: Tensor, flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """head(), and the gradient of Σ (nll + z·lse²): (nll, lse2, dX bf16[T, D]); sums i64[V, D] gain the weight's."""
    (tokens, width), vocab = x.hi.shape, len(w.scale)
    losses, dx, x_columns = zeros((2,), torch.int64), empty((tokens, width), torch.int16), transposed(x.hi)
    softmax = _softmax(x, w, targets, two_z, tokens, losses, flag)
    scale, inverse = _scales(softmax, x, w, flag)
    every = slice(None)
    if tokens * vocab * 8 <= BUDGET:
        by_token, by_column = _codes(softmax, x, w, inverse, every, every)
        _input_gradient(by_token, scale[:tokens], w, targets, dx)
        _weight_gradient(by_column, scale[tokens:], x_columns, sums, flag)
    else:
        for span in _spans(tokens, PART // (2 * vocab)):
            codes, _ = _codes(softmax, x, w, inverse, span, None)
            _input_gradient(codes, scale[:tokens][span], w, targets[span], dx[span])
        for span in _spans(vocab, PART // (2 * tokens)):
            _, codes = _codes(softmax, x, w, inverse, None, span)
            _weight_gradient(codes, scale[tokens:][span], x_columns, sums[span], flag)
    _subtract_targets(x, targets, sums, flag)
    return losses[0], losses[1], dx


def _spans(count: int, size: int) -> list[slice]:
    """0…count in parts of `size` at most, but of WHOLE at least, so that tiles stay whole."""
    step = max(WHOLE, size // WHOLE * WHOLE)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _softmax(
    x: Rows, w: Weight, targets: Tensor, two_z: np.float32, terms: int, losses: Tensor, flag: Tensor
) -> Softmax:
    """The logits of some tokens of a unit of `terms`, and what is known of each; losses i64[2] gain theirs."""
    (tokens, width), vocab = x.hi.shape, len(w.scale)
    softmax = Softmax(empty((tokens, vocab), torch.float32), *empty((3, tokens), torch.float32))
    peak = torch.full((tokens,), LOWEST.value, dtype=torch.int32, device=x.hi.device)
    left = (x.hi, low_slice(x), x.scale, w.hi, w.scale)
    _product(logits_kernel, LOGITS, (tokens, vocab, width), *left, softmax.logits, peak, SLICES=slice_count(x))
    known = (softmax.logits, peak, targets, *softmax[1:], losses, float(two_z), float(np.float32(terms)), vocab, flag)
    launch(losses_kernel, (tokens,), *known, **LOSSES, STEPS=cdiv(vocab, LOSSES["BLOCK"]))
    return softmax


def _scales(softmax: Softmax, x: Rows, w: Weight, flag: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, multipliers to codes), f32[T + V]: of the gradient's rows, then of its columns."""
    tokens, vocab = softmax.logits.shape
    tops = zeros((tokens + vocab,), torch.int32)
    scale, inverse = empty((2, tokens + vocab), torch.float32)
    grid = (cdiv(vocab, TOPS["C"]), cdiv(tokens, TOPS["R"] * TOPS["STEPS"]))
    launch(tops_kernel, grid, *softmax, x.scale, w.scale, tops, tokens, vocab, HIGH=_high(x), **TOPS)
    launch(scales_kernel, (cdiv(len(tops), SCALES["BLOCK"]),), tops, scale, inverse, len(tops), flag, **SCALES)
    return scale, inverse


def _codes(
    softmax: Softmax, x: Rows, w: Weight, inverse: Tensor, rows: slice | None, columns: slice | None
) -> tuple[Tensor, Tensor]:
    """Codes by token of `rows`, int8[2, R, V], and by column of `columns`, int8[2, C, T]; high slices first.

    None makes none, and with both from one reading each must be whole.
    """
    tokens, vocab = softmax.logits.shape
    some, others = rows or slice(tokens), columns or slice(vocab)
    part = softmax.cut(some, others)
    r, c = part.logits.shape
    by_token = empty((2, r, c) if rows else (2, 0, 0), torch.int8)
    by_column = empty((2, c, r) if columns else (2, 0, 0), torch.int8)
    scales = (x.scale[some], w.scale[others], inverse[:tokens][some], inverse[tokens:][others])
    launch(
        codes_kernel,
        (cdiv(c, CODES["C"]), cdiv(r, CODES["R"])),
        *(*part, *scales, *by_token, *by_column, r, c, vocab),
        **CODES,
        HIGH=_high(x),
        BY_TOKEN=rows is not None,
        BY_COLUMN=columns is not None,
    )
    return by_token, by_column


def _input_gradient(codes: Tensor, scale: Tensor, w: Weight, targets: Tensor, dx: Tensor) -> None:
    """dX bf16[R, D] of some tokens, from their codes int8[2, R, V] and scales."""
    _, tokens, vocab = codes.shape
    shape = (tokens, dx.shape[1], vocab)
    _product(input_kernel, INPUT, shape, *codes, scale, w.layout, w.hi, w.scale, targets, dx)


def _weight_gradient(codes: Tensor, scale: Tensor, x_columns: Tensor, sums: Tensor, flag: Tensor) -> None:
    """The softmax's part of some rows of dW, from their codes int8[2, C, T], into sums i64[C, D]."""
    _, vocab, tokens = codes.shape
    _product(weight_kernel, WEIGHT, (vocab, len(x_columns), tokens), *codes, scale, x_columns, sums, flag)


def _product(
    kernel: Any, tile: dict[str, Any], shape: tuple[int, int, int], *arguments: Tensor, **constants: Any
) -> None:
    """A product of (rows, columns, inner), one tile a program."""
    rows, columns, inner = shape
    grid = (cdiv(rows, tile["M"]) * cdiv(columns, tile["N"]),)
    launch(kernel, grid, *arguments, rows, columns, INNER=inner, **tile, **constants)


def _subtract_targets(x: Rows, targets: Tensor, sums: Tensor, flag: Tensor) -> None:
    """sums[y] −= rint(X̂·2²⁴) for each token's target y."""
    tokens, width = x.hi.shape
    scalars = (float(np.float32(tokens)), width, flag)
    arguments = (x.hi, low_slice(x), x.scale, targets, sums, *scalars)
    launch(target_kernel, (tokens, cdiv(width, TARGET["BLOCK"])), *arguments, **TARGET, SLICES=slice_count(x))


def _high(x: Rows) -> float:
    """What the high slice counts in units of the scale."""
    return 1.0 if x.lo is None else 256.0
