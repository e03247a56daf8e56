"""What the attention kernels share: tiles of rows, the keys in reach, probabilities, two-slice codes of a tile, and
where the tiles that the backward stores lie.

Rows of a unit are (window, token, head), E wide. The kernels read per-row numbers head by head, [window, head, P], and
operands whose contraction runs over tokens turned, [window, head, E, P], where P pads a window's length to a multiple
of PAD with zeros: a padded row's scale 0 makes everything of it 0, so no loop asks for the end of a window.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import AttentionShape, Rows
from kernels.nvidia.elementary import exp2_down
from kernels.nvidia.numbers import bits, empty, from_bits, launch
from kernels.nvidia.tiles import next_power

PAD = 128  # tokens; every block divides it
WIDEST_HEAD = 256  # channels: of more, a block's shared memory does not hold its tiles
TILE = tl.constexpr(64)  # queries and keys of a stored tile
TILE_SIZE = tl.constexpr(64 * 64)
COUNT_UNIT = tl.constexpr(2.0**-18)  # of a row's sum of probabilities
TURN = 64  # tokens of a block of the copying kernel
MAGIC_CODE = tl.constexpr(1.5 * 2.0**23 + 128.0)  # x + it: the low 16 bits are rint(x) + 128


@triton.jit
def rows_of(x, row, e, E: tl.constexpr, EP: tl.constexpr):
    """The tile [R, EP] of rows `row` of x [·, E]; columns past E are 0."""
    at = x + row[:, None] * E + e[None, :]
    if E == EP:
        return tl.load(at)
    return tl.load(at, mask=(e < E)[None, :], other=0)


@triton.jit
def turned_of(x, place, j, e, P, E: tl.constexpr, EP: tl.constexpr):
    """The tile [EP, BJ] of tokens j (a whole block) of head `place` of turned x [·, E, P]; rows past E are 0."""
    at = x + (place * E + e)[:, None] * P + j[None, :]
    if E == EP:
        return tl.load(at)
    return tl.load(at, mask=(e < E)[:, None], other=0)


@triton.jit
def in_sight(i, j, W):
    """Which keys j each query i sees: [BI, BJ]."""
    distance = i[:, None] - j[None, :]
    return (distance >= 0) & (distance < W)


@triton.jit
def scores(q, k, q_scale, k_scale):
    """S = f32(q·k)·s_q·s_k, f32[BI, BJ], of q int8[BI, E] and k int8[BJ, E]."""
    product = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    return (product.to(tl.float32) * q_scale[:, None]) * k_scale[None, :]


@triton.jit
def weights(product, q_scale, k_scale, peak, inverse):
    """P = exp2(S − peak)·inverse from products q·k; the numbers are broadcast to the tile already."""
    return exp2_down((product.to(tl.float32) * q_scale) * k_scale - peak) * inverse


@triton.jit
def score_gradient(p, hi, lo, d_scale, v_scale, delta):
    """dS = P·(dP − delta) from P and the products hi·v, lo·v, which are below 2²³: their sum in int32 rounds once, as
    that of their float32 does; so E ≤ 512."""
    dp = ((hi * 256 + lo).to(tl.float32) * d_scale) * v_scale
    return p * (dp - delta)


@triton.jit
def numbers_of(numbers, at, SIZE):
    """The five numbers of rows `at`, from planes of SIZE: s_q, the row's peak and 1 ÷ its sum, s_dO, Σ dO·O."""
    s_q, peak, inverse = tl.load(numbers + at), tl.load(numbers + SIZE + at), tl.load(numbers + 2 * SIZE + at)
    return s_q, peak, inverse, tl.load(numbers + 3 * SIZE + at), tl.load(numbers + 4 * SIZE + at)


@triton.jit
def slices_of(x):
    """(hi, lo) int8 of the two-slice codes rint(x), |x| ≤ 32,512."""
    code = bits(x + MAGIC_CODE)  # rint(x) + 128 in its low 16 bits: hi above, lo + 128 below
    return (code >> 8).to(tl.int8), (code ^ 128).to(tl.int8)


@triton.jit
def two_slices(hi, lo):
    """f32(hi)·2⁸ + f32(lo) of two int32 products."""
    return hi.to(tl.float32) * 256.0 + lo.to(tl.float32)


@triton.jit
def keys_in_reach(start, S, W, BI: tl.constexpr, BJ: tl.constexpr):
    """(first, inner, outer, last): the blocks of BJ keys that queries start … start + BI − 1 see, [first, last), and
    those that all of these see whole, [inner, outer)."""
    first = tl.maximum(start - W + 1, 0) // BJ
    last = tl.cdiv(tl.minimum(start + BI, S), BJ)
    inner = tl.minimum(tl.cdiv(tl.maximum(start + BI - W, 0), BJ), last)
    return first, inner, tl.maximum(inner, (start + 1) // BJ), last


@triton.jit
def queries_in_reach(start, S, W, BI: tl.constexpr, BJ: tl.constexpr):
    """(first, inner, outer, last): the blocks of BI queries that see any of keys start … start + BJ − 1, [first, last),
    and those of which all see all of these, [inner, outer)."""
    first = start // BI
    last = tl.cdiv(tl.minimum(start + BJ - 1 + W, S), BI)
    inner = tl.minimum(tl.cdiv(start + BJ - 1, BI), tl.maximum(last, first))
    return first, inner, tl.maximum(inner, tl.minimum(start + W, S) // BI), last


@triton.jit
def split_block(index, first, inner, outer):
    """The index-th block of [first, inner) and [outer, ∞)."""
    return tl.where(index < inner - first, first + index, outer + index - (inner - first))


@triton.jit
def tile_number(place, i, j, SLOTS, TILES):
    """Where the tile of query block i and key block j of a head is stored, i64: a head has TILES, by query block, of
    which each has those of the last SLOTS key blocks up to its own."""
    full = tl.minimum(i, SLOTS - 1)
    before = full * (full + 1) // 2 + (i - full) * SLOTS
    return place.to(tl.int64) * TILES + (before + j - (i - full))


@triton.jit
def _lay(
    x, scale, turned, scales, tops, S, P, W, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, B: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """B tokens of one head: scales f32[N, H, P]; with TURNED also the rows turned, and tops f32[N, H, P], each query's
    largest visible scale."""
    block, place = tl.program_id(0), tl.program_id(1)
    t = block * B + tl.arange(0, B)
    first = place // H * S
    row = (first + t) * H + place % H
    tl.store(scales + place * P + t, tl.load(scale + row, mask=t < S, other=0.0))
    if TURNED:
        e = tl.arange(0, EP)
        tile = tl.load(x + row[:, None] * E + e[None, :], mask=(t < S)[:, None] & (e < E)[None, :], other=0)
        tl.store(turned + (place * E + e)[:, None] * P + t[None, :], tl.trans(tile), mask=(e < E)[:, None])
        top = tl.zeros((B,), tl.int32)
        for b in range(tl.maximum(block * B - W + 1, 0) // B, block + 1):
            j = b * B + tl.arange(0, B)
            s = bits(tl.load(scale + (first + j) * H + place % H, mask=j < S, other=0.0))
            top = tl.maximum(top, tl.max(tl.where(in_sight(t, j, W), s[None, :], 0), 1))
        tl.store(tops + place * P + t, from_bits(top))


class Laid:
    """Rows of one kind as the kernels read them: hi as it came, scale f32[N, H, P], and if turned int8[N, H, E, P] and
    top f32[N, H, P], the largest scale that each query sees."""

    def __init__(self, x: Rows, heads: int, shape: AttentionShape, turn: bool) -> None:
        windows, length, sizes = len(x.scale) // (shape.sequence * heads), padded(shape.sequence), common(shape)
        self.hi: Tensor = x.hi.contiguous()
        self.scale = empty((windows, heads, length), torch.float32)
        self.top = empty((windows, heads, length), torch.float32) if turn else self.scale
        self.turned = empty((windows, heads, shape.width, length), torch.int8) if turn else self.hi
        launch(
            _lay, (length // TURN, windows * heads), self.hi, x.scale.contiguous(), self.turned, self.scale, self.top,
            **{name: sizes[name] for name in ("S", "P", "W", "E", "EP")}, H=heads, B=TURN, TURNED=turn, num_warps=4,
        )  # fmt: skip


def padded(sequence: int) -> int:
    """A window's length in the kernels' own arrays."""
    return triton.cdiv(sequence, PAD) * PAD


def padded_width(width: int) -> int:
    """The power of two that a head's width is padded to: what the integer product asks for."""
    return max(32, next_power(width))


def stored_tiles(shape: AttentionShape) -> tuple[int, int]:
    """(SLOTS, TILES) of tile_number: the key blocks that a block of queries sees at most, and all of a head."""
    tile, blocks = TILE.value, triton.cdiv(shape.sequence, TILE.value)
    slots = min(blocks, (min(shape.window, shape.sequence) + tile - 2) // tile + 1)
    return slots, slots * (slots + 1) // 2 + (blocks - slots) * slots


def common(shape: AttentionShape) -> dict[str, Any]:
    """The arguments that all kernels take: sequence length, its padding, window, heads and widths.

    ValueError where a head is wider than WIDEST_HEAD.
    """
    if shape.width > WIDEST_HEAD:
        raise ValueError(f"a head of {shape.width} channels: the kernels of attention hold {WIDEST_HEAD} at most")
    return {
        "S": shape.sequence,
        "P": padded(shape.sequence),
        "W": min(shape.window, shape.sequence),
        "H": shape.heads,
        "K": shape.kv_heads,
        "E": shape.width,
        "EP": padded_width(shape.width),
    }
