"""What a backward product needs: a gradient's codes by token and, transposed, by channel; codes transposed.

A gradient is read twice: for the maxima of its rows and columns, which join across tiles by an atomic maximum of bits,
then for the codes of both. The parts that read the same rows lie side by side: token codes int8[T, ΣO], channel codes
int8[ΣO, T]. Definition: kernels/reference/products.py and quantise.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import GradientSlices, Part, Rows
from kernels.nvidia.codes import store_codes, store_slices
from kernels.nvidia.numbers import (
    INFINITE,
    checked_top,
    code_of,
    empty,
    f32_of_bf16,
    inverse_of,
    launch,
    magnitude,
    scale_of,
    zeros,
)

MAXIMA = {"BLOCK_T": 64, "BLOCK_O": 128, "num_warps": 4}
CODES = {"BLOCK_T": 64, "BLOCK_O": 128, "num_warps": 8}
TRANSPOSE = {"BLOCK_R": 128, "BLOCK_C": 128, "num_warps": 4}


class GradientCodes(NamedTuple):
    """Gradients of the parts, quantised in both directions; `lo` is `hi` where there is one slice."""

    token_hi: Tensor  # int8 [T, ΣO]
    token_lo: Tensor
    channel_hi: Tensor  # int8 [ΣO, T]
    channel_lo: Tensor
    token_scale: Tensor  # f32 [parts, T]
    channel_scale: Tensor  # f32 [ΣO]


@triton.jit
def _part(tile, a, b, c, O1, O2, O3, PARTS: tl.constexpr, BLOCK_O: tl.constexpr):
    """Of a tile of columns: (its pointer of a, b, c, its part, the part's width and first column, the tile in it)."""
    if PARTS == 1:
        return a, 0, O1, 0, tile
    first, second = tl.cdiv(O1, BLOCK_O), tl.cdiv(O1, BLOCK_O) + tl.cdiv(O2, BLOCK_O)
    after_1, after_2 = tile >= first, tile >= second
    pointer = tl.where(after_2, c, tl.where(after_1, b, a))
    width = tl.where(after_2, O3, tl.where(after_1, O2, O1))
    begin = tl.where(after_2, O1 + O2, tl.where(after_1, O1, 0))
    tile -= tl.where(after_2, second, tl.where(after_1, first, 0))
    return pointer, after_1.to(tl.int32) + after_2.to(tl.int32), width, begin, tile


@triton.jit
def _load(dy, t, o, T, width):
    """A tile of dY as bf16 bits, 0 outside."""
    inside = (t < T)[:, None] & (o < width)[None, :]
    return tl.load(dy + t.to(tl.int64)[:, None] * width + o[None, :], mask=inside, other=0)


@triton.jit
def _scaled(dy, weight_scale, x_scale, t, o, T, width, TWO: tl.constexpr):
    """(dY·scale_w, dY·scale_x) of a tile of bf16 bits; scale_x is that of the high slice alone."""
    d = f32_of_bf16(dy)
    high_scale = tl.load(x_scale + t, mask=t < T, other=0.0)
    if TWO:
        high_scale = high_scale * 256.0
    by_token = d * tl.load(weight_scale + o, mask=o < width, other=0.0)[None, :]
    return by_token, d * high_scale[:, None]


@triton.jit
def _maxima(
    dy1, dy2, dy3, w1, w2, w3, x_scale, token_top, channel_top,
    T, O1, O2, O3, TWO: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Take the magnitudes of a tile of dY·scale_w into its rows' maxima i32[parts, T], of dY·scale_x into its
    columns' i32[ΣO]."""
    tile = tl.program_id(0)
    dy, part, width, begin, place = _part(tile, dy1, dy2, dy3, O1, O2, O3, PARTS, BLOCK_O)
    weight_scale, _, _, _, _ = _part(tile, w1, w2, w3, O1, O2, O3, PARTS, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = place * BLOCK_O + tl.arange(0, BLOCK_O)
    by_token, by_channel = _scaled(_load(dy, t, o, T, width), weight_scale, x_scale, t, o, T, width, TWO)
    tl.atomic_max(token_top + part * T + t, tl.max(magnitude(by_token), 1), mask=t < T, sem="relaxed")
    tl.atomic_max(channel_top + begin + o, tl.max(magnitude(by_channel), 0), mask=o < width, sem="relaxed")


@triton.jit
def _finish(top, scale, at, inside, writes, flag, SLICES: tl.constexpr):
    """The multipliers of maxima; the one program that `writes` them stores the scales, and raises the flag."""
    top = tl.load(top + at, mask=inside, other=0)
    if writes:
        tl.store(scale + at, scale_of(checked_top(top, flag), SLICES), mask=inside)
    return inverse_of(tl.where(top >= INFINITE, 0, top), SLICES)


@triton.jit
def _codes(
    dy1, dy2, dy3, w1, w2, w3, x_scale, token_top, channel_top, token_scale, channel_scale,
    token_hi, token_lo, channel_hi, channel_lo, flag, T, O1, O2, O3, TOTAL, BY_TOKEN: tl.constexpr,
    BY_CHANNEL: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Codes of a tile by token, and by channel in the transpose, in BY_TOKEN and BY_CHANNEL slices."""
    tile, band = tl.program_id(0), tl.program_id(1)
    dy, part, width, begin, place = _part(tile, dy1, dy2, dy3, O1, O2, O3, PARTS, BLOCK_O)
    weight_scale, _, _, _, _ = _part(tile, w1, w2, w3, O1, O2, O3, PARTS, BLOCK_O)
    t, o = band * BLOCK_T + tl.arange(0, BLOCK_T), place * BLOCK_O + tl.arange(0, BLOCK_O)
    in_t, in_o = t < T, o < width
    gradient = _load(dy, t, o, T, width)  # under way while the scales are made
    token_inverse = _finish(token_top, token_scale, part * T + t, in_t, place == 0, flag, BY_TOKEN)
    channel_inverse = _finish(channel_top, channel_scale, begin + o, in_o, band == 0, flag, BY_CHANNEL)
    by_token, by_channel = _scaled(gradient, weight_scale, x_scale, t, o, T, width, TWO)
    at = t.to(tl.int64)[:, None] * TOTAL + (begin + o)[None, :]
    inside = in_t[:, None] & in_o[None, :]
    store_codes(code_of(by_token, token_inverse[:, None]), token_hi, token_lo, at, inside, BY_TOKEN)
    at = (begin + o).to(tl.int64)[:, None] * T + t[None, :]
    inside = in_o[:, None] & in_t[None, :]
    code = tl.trans(code_of(by_channel, channel_inverse[None, :]))
    if BY_CHANNEL == 1:
        tl.store(channel_hi + at, code.to(tl.int8), mask=inside)
    else:
        store_slices(channel_hi, channel_lo, at, code + 128, inside)


def gradient_codes(x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: Tensor) -> GradientCodes:
    """Codes of the parts' dY·scale_w by token and of dY·scale_x by channel over the unit's tokens, for rows x."""
    tokens, widths = x.hi.shape[0], [part.dy.shape[1] for part in parts]
    total, count = sum(widths), len(parts)
    tops, scales = zeros((count * tokens + total,), torch.int32), empty((count * tokens + total,), torch.float32)
    by_token = empty((slices.input, tokens, total), torch.int8)
    by_channel = empty((slices.weight, total, tokens), torch.int8)
    result = GradientCodes(
        *(by_token[0], by_token[-1], by_channel[0], by_channel[-1]),
        *(scales[: count * tokens].view(count, tokens), scales[count * tokens :]),
    )
    filled = [parts[min(index, count - 1)] for index in range(3)]
    inputs = [*(part.dy.contiguous() for part in filled), *(part.weight.scale for part in filled), x.scale]
    inputs += [tops, tops[count * tokens :]]
    sizes = [tokens, *widths, *[0] * (3 - count)]
    constants = {"TWO": x.lo is not None, "PARTS": count}
    launch(_maxima, _grid(tokens, widths, MAXIMA), *inputs, *sizes, **constants, **MAXIMA)
    outputs = [result.token_scale, result.channel_scale, *result[:4], flag]
    constants |= {"BY_TOKEN": slices.input, "BY_CHANNEL": slices.weight}
    launch(_codes, _grid(tokens, widths, CODES), *inputs, *outputs, *sizes, total, **constants, **CODES)
    return result


def _grid(tokens: int, widths: list[int], sizes: dict[str, int]) -> tuple[int, ...]:
    return sum(triton.cdiv(width, sizes["BLOCK_O"]) for width in widths), triton.cdiv(tokens, sizes["BLOCK_T"])


@triton.jit
def _transpose(source, out, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """out int8[C, R] = source int8[R, C] transposed, one tile."""
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_r, in_c = r < R, c < C
    tile = tl.load(source + r.to(tl.int64)[:, None] * C + c[None, :], mask=in_r[:, None] & in_c[None, :], other=0)
    at = c.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(out + at, tl.trans(tile), mask=in_c[:, None] & in_r[None, :])


def transposed(x: Tensor) -> Tensor:
    """A transposed copy int8[C, R] of codes int8[R, C]."""
    rows, columns = x.shape
    out = empty((columns, rows), torch.int8)
    grid = triton.cdiv(columns, TRANSPOSE["BLOCK_C"]), triton.cdiv(rows, TRANSPOSE["BLOCK_R"])
    launch(_transpose, grid, x, out, rows, columns, **TRANSPOSE)
    return out
