"""Tiles of int8 products in tensor cores, and their values as f32.

Both operands have the contracted index contiguous in memory, as Hopper's int8 instructions want. Rows and columns
beyond a matrix repeat its last one: loops need no masks for them, and a repeated value raises no flag of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_TERMS = 131_071  # beyond it a sum of 128 · 128 leaves int32


@triton.jit
def tile_of(ROW_TILES, COLUMN_TILES, GROUP: tl.constexpr):
    """(row tile, column tile) of this program: groups of row tiles, so that neighbours share operands in L2."""
    program = tl.program_id(0)
    first = (program // (GROUP * COLUMN_TILES)) * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    inside = program % (GROUP * COLUMN_TILES)
    return first + inside % height, inside // height


@triton.jit
def codes(at, start, terms, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of codes at pointers; those past the contraction's end are 0."""
    if K % BLOCK_K == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=start + terms < K, other=0)


@triton.jit
def value(hi, lo, right, K: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right), of pointers to the starts of rows; contracts K codes.

    K is known when a kernel is compiled: a model has few widths, and the interpreter's loops want it so. Both slices
    meet each tile of `right` while it is loaded.
    """
    terms = tl.arange(0, BLOCK_K)
    hi_at, right_at = hi[:, None] + terms[None, :], right[None, :] + terms[:, None]
    high = tl.zeros((hi.shape[0], right.shape[0]), tl.int32)
    if SLICES == 1:
        for start in range(0, K, BLOCK_K):
            b = codes(right_at, start, terms[:, None], K, BLOCK_K)
            high = tl.dot(codes(hi_at, start, terms[None, :], K, BLOCK_K), b, high, out_dtype=tl.int32)
            hi_at += BLOCK_K
            right_at += BLOCK_K
        result = high.to(tl.float32)
    else:
        lo_at = lo[:, None] + terms[None, :]
        low = tl.zeros((hi.shape[0], right.shape[0]), tl.int32)
        for start in range(0, K, BLOCK_K):
            b = codes(right_at, start, terms[:, None], K, BLOCK_K)
            high = tl.dot(codes(hi_at, start, terms[None, :], K, BLOCK_K), b, high, out_dtype=tl.int32)
            low = tl.dot(codes(lo_at, start, terms[None, :], K, BLOCK_K), b, low, out_dtype=tl.int32)
            hi_at += BLOCK_K
            lo_at += BLOCK_K
            right_at += BLOCK_K
        result = high.to(tl.float32) * 256.0 + low.to(tl.float32)
    return result


def check_terms(*counts: int) -> None:
    """Refuse a contraction that int32 may not hold. Raises ValueError."""
    if max(counts) > MAX_TERMS:
        raise ValueError(
            f"an int8 product over {max(counts)} terms: int32 holds {MAX_TERMS}; check the widths and the unit's tokens"
        )
