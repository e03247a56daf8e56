"""Linear layers on NVIDIA against the reference, in Triton's interpreter: every byte of the outputs, and the flag."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import conformance, reference
from kernels.interface import GradientSlices, Part, Rows, Weight
from kernels.nvidia import linear, products, transpose
from kernels.reference.numbers import bf16
from tests.kernels.nvidia.rows import F32, on_device

WILD = "wild"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# tokens, input width, output widths: odd, narrow, more than one tile in each direction, whole blocks of the contraction
SIZES = ((1, 1, (1,)), (17, 129, (127, 1, 33)), (129, 17, (130, 5)), (128, 128, (256,)), (257, 130, (129, 3, 2)))


def draw(name: str, shape: tuple[int, ...], kind: str = "plain") -> np.ndarray:
    return conformance._floats(name, shape, kind)


def rows(shape: tuple[int, int], slices: int, kind: str = "plain") -> Rows:
    return reference.quantise_rows(bf16(draw("x", shape, kind)), slices, reference.new_flag())


def weight(name: str, shape: tuple[int, int], rule: str = "max") -> Weight:
    return reference.quantise_weight(draw(name, shape), rule, reference.new_flag())


def parts_of(tokens: int, inputs: int, widths: tuple[int, ...], kind: str = "plain") -> tuple[Part, ...]:
    return tuple(
        Part(
            bf16(draw(f"dy {index}", (tokens, width), kind)),
            weight(f"w {index}", (width, inputs), ("max", "lsq")[index % 2]),
            np.full((width, inputs), 5 - index, np.int64),
        )
        for index, width in enumerate(widths)
    )


def same(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    return tensor.numpy().tobytes() == expected.tobytes() and tuple(tensor.shape) == expected.shape


def backward_agrees(x: Rows, parts: tuple[Part, ...], slices: int, of_weight: int = 0) -> int:
    """Compare dX, every part's sums and the flag; returns the flag. `of_weight` slices, if given, go to dW."""
    both = GradientSlices(slices, of_weight or slices)
    flag, own_flag = reference.new_flag(), torch.zeros(1, dtype=torch.int32)
    own = tuple(on_device(part) for part in parts)
    dx = linear.linear_backward(on_device(x), own, both, own_flag)
    assert same(dx, reference.linear_backward(x, parts, both, flag))
    for part, copy in zip(parts, own, strict=True):
        assert same(copy.sums, part.sums)
    assert int(own_flag) == int(flag[0])
    return int(own_flag)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_forward(size: tuple[int, int, tuple[int, ...]], slices: int) -> None:
    tokens, inputs, (width, *_) = size
    x, w, residual = rows((tokens, inputs), slices), weight("w", (width, inputs)), bf16(draw("r", (tokens, width)))
    assert same(linear.project(on_device(x), on_device(w)), reference.project(x, w))
    added = linear.project_add(on_device(x), on_device(w), on_device(residual))
    assert same(added, reference.project_add(x, w, residual))


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_backward(size: tuple[int, int, tuple[int, ...]], slices: int) -> None:
    tokens, inputs, widths = size
    assert backward_agrees(rows((tokens, inputs), 3 - slices), parts_of(tokens, inputs, widths), slices) == 0


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("kind", [WILD, "nonfinite"])
def test_backward_of_odd_values(kind: str, slices: int) -> None:
    x = rows((130, 65), slices, WILD if kind == WILD else "plain")
    assert backward_agrees(x, parts_of(130, 65, (33, 129, 2), kind), slices) == 1


@pytest.mark.parametrize("slices", [(2, 2), (1, 2), (2, 1)])
def test_slices_of_each_product(slices: tuple[int, int]) -> None:
    assert backward_agrees(rows((65, 33), 2), parts_of(65, 33, (40, 31, 2)), *slices) == 0


@pytest.mark.parametrize("slices", [1, 2])
def test_no_tile_reaches_a_bit(slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"M": 16, "N": 16, "K": 32, "GROUP": 2}
    for name in ("TILE", "PARTS", "SUMS"):
        monkeypatch.setattr(linear, name, small | ({"CHUNK": 8} if name == "SUMS" else {}))
    for name in ("MAXIMA", "CODES"):
        monkeypatch.setattr(transpose, name, {"BLOCK_T": 32, "BLOCK_O": 16})
    x, parts = rows((35, 20), slices), parts_of(35, 20, (70, 17, 2))
    w = parts[0].weight
    assert same(linear.project(on_device(x), on_device(w)), reference.project(x, w))
    for some in (parts, parts[:1]):
        assert backward_agrees(x, some, slices) == 0


def test_gradients_near_the_limit_of_the_sums() -> None:
    """2²⁰ · scale · 127 is just below 2²⁷, or not: then it counts as 0."""
    raised = []
    bits = int(F32(2.0**7 / 127).view(np.int32))
    for step in (-4, -1, 0, 1, 4):
        scale = np.array([bits + step], np.int32).view(F32)
        x = Rows(np.full((1, 3), 127, np.int8), None, scale)
        part = Part(bf16(np.array([[2.0**20, -(2.0**20)]], F32)), weight("w", (2, 3)), np.full((2, 3), 7, np.int64))
        raised.append(backward_agrees(x, (part,), 1))
        assert (raised[-1] == 1) == bool(np.all(part.sums == 7))
    assert raised[0] == 0 and raised[-1] == 1


@pytest.mark.parametrize("part", [0, 1, 2])
def test_one_value_of_any_part_voids_the_step(part: int) -> None:
    parts = parts_of(130, 9, (3, 140, 2))
    parts[part].dy[129, -1] = 0x7F80
    assert backward_agrees(rows((130, 9), 1), parts, 1) == 1


def test_largest_codes_over_a_long_contraction() -> None:
    """127 · 127 and −128 · 127 over 4,100 terms pass what float32 holds."""
    hi, lo = np.full((2, 4100), 127, np.int8), np.full((2, 4100), -128, np.int8)
    hi[1] = -127
    x = Rows(hi, lo, np.array([1.0, 3.0], F32))
    w = Weight(np.full((3, 4100), 127, np.int8), np.array([1.0, 0.1, 5.0], F32))
    w.hi[1, ::7] = -126
    assert same(linear.project(on_device(x), on_device(w)), reference.project(x, w))


def test_more_terms_than_int32_holds_are_refused() -> None:
    products.check_terms(products.MAX_TERMS)
    with pytest.raises(ValueError, match="131072 terms: int32 holds 131071"):
        products.check_terms(5, products.MAX_TERMS + 1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (129, 257)])
def test_transposed(shape: tuple[int, int]) -> None:
    x = (draw("codes", shape) * F32(60)).astype(np.int8)
    assert same(transpose.transposed(on_device(x)), np.ascontiguousarray(x.T))
