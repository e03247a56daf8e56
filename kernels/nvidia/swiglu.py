"""SwiGLU, forward and backward. Definition: kernels/reference/layers.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Rows
from kernels.nvidia.codes import store_codes
from kernels.nvidia.elementary import sigmoid
from kernels.nvidia.numbers import bf16, checked_top, code_of, f32_of_bf16, inverse_of, launch, magnitude, scale_of
from kernels.nvidia.quantise import empty_rows
from kernels.nvidia.tiles import WIDEST, next_power, previous_power

ROW_VALUES, ROW_LANE = 2048, 24  # of a program, of a thread
BACK_ROWS, BACK_COLUMNS, BACK_WARPS = 4, 512, 4  # 5,632 is eleven times 512


def _split(width: int) -> tuple[int, int]:
    """Two powers of two that hold a row with less waste than one: 5,632 fits 4,096 + 2,048; the second may be 0."""
    first = previous_power(width)
    return first, next_power(width - first) if width > first else 0


@triton.jit
def _gated(gate_up, row, count, WIDTH: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr):
    """(gate·sigmoid(gate))·up of columns START…; their offsets in the output, and what lies inside."""
    column = START + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    source = row.to(tl.int64)[:, None] * (2 * WIDTH) + column[None, :]
    gate = f32_of_bf16(tl.load(gate_up + source, mask=inside, other=0))
    up = f32_of_bf16(tl.load(gate_up + WIDTH + source, mask=inside, other=0))
    return (gate * sigmoid(gate)) * up, place, inside


@triton.jit
def _swiglu_rows(
    gate_up,
    hi,
    lo,
    scale,
    flag,
    count,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
):
    """Each program makes and quantises ROWS rows, held in two tiles of FIRST and REST columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    left, left_place, left_inside = _gated(gate_up, row, count, WIDTH, 0, FIRST)
    top = tl.max(magnitude(left), 1)
    if REST > 0:
        right, right_place, right_inside = _gated(gate_up, row, count, WIDTH, FIRST, REST)
        top = tl.maximum(top, tl.max(magnitude(right), 1))
    top = checked_top(top, flag)
    inverse = inverse_of(top, SLICES)[:, None]
    store_codes(code_of(left, inverse), hi, lo, left_place, left_inside, SLICES)
    if REST > 0:
        store_codes(code_of(right, inverse), hi, lo, right_place, right_inside, SLICES)
    tl.store(scale + row, scale_of(top, SLICES), mask=row < count)


def swiglu_rows(gate_up: Tensor, slices: int, flag: Tensor) -> Rows:
    """(gate·sigmoid(gate))·up, Rows[T, F] of gate_up bf16[T, 2F]; gate is the first half of each row.

    Definition: kernels/reference/layers.py.
    """
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    if width > WIDEST:
        raise ValueError(f"a row of {width} values: a program holds {WIDEST:,} at most")
    rows = empty_rows(count, width, slices)
    first, rest = _split(width)
    height = max(1, previous_power(ROW_VALUES // (first + rest)))
    warps = min(16, max(1, previous_power(height * (first + rest) // (32 * ROW_LANE))))
    tile = {"ROWS": height, "FIRST": first, "REST": rest, "num_warps": warps}
    grid = (triton.cdiv(count, height),)
    launch(_swiglu_rows, grid, gate_up, *rows, flag, count, WIDTH=width, SLICES=slices, **tile)
    return rows


@triton.jit
def _swiglu_backward(dh, gate_up, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program takes a tile of dh, and writes the same tile of both halves in their place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * (2 * WIDTH) + column[None, :]
    d = f32_of_bf16(tl.load(dh + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside, other=0))
    gate = f32_of_bf16(tl.load(gate_up + place, mask=inside, other=0))
    up = f32_of_bf16(tl.load(gate_up + WIDTH + place, mask=inside, other=0))
    s = sigmoid(gate)
    tl.store(gate_up + place, bf16((d * up) * (s * (1.0 + gate * (1.0 - s)))), mask=inside)
    tl.store(gate_up + WIDTH + place, bf16(d * (gate * s)), mask=inside)


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> Tensor:
    """bf16[T, 2F] in gate_up's place, from dh bf16[T, F]: d_gate = (dh·up)·(s·(1 + gate·(1 − s))), d_up = dh·(gate·s).

    Definition: kernels/reference/layers.py.
    """
    count, width = dh.shape
    grid = (triton.cdiv(count, BACK_ROWS), triton.cdiv(width, BACK_COLUMNS))
    tile = {"ROWS": BACK_ROWS, "COLUMNS": BACK_COLUMNS, "num_warps": BACK_WARPS}
    launch(_swiglu_backward, grid, dh.contiguous(), gate_up, count, WIDTH=width, **tile)
    return gate_up
