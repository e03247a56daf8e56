"""Quantisers as Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from kernels.nvidia import quantise
from kernels.reference import new_flag
from tests.kernels.nvidia.rows import F32, KINDS, halves, on_device, same, values

SHAPES = ((1, 1), (3, 17), (129, 16), (40, 128), (2, 704), (3, 2048))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("slices", [1, 2])
def test_rows(shape: tuple[int, int], kind: str, slices: int) -> None:
    same(quantise.quantise_rows, reference.quantise_rows, halves(1, shape, kind), slices, new_flag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5632)], ids=str)
@pytest.mark.parametrize("rule", ["max", "lsq"])
def test_weights(shape: tuple[int, int], kind: str, rule: str) -> None:
    same(quantise.quantise_weight, reference.quantise_weight, values(2, shape, kind), rule, new_flag())


def test_weights_that_lsq_clips_or_whose_sum_is_beyond_float32() -> None:
    w = np.array([[3, *[0.01] * 99], [2.0**127] * 100, [-(2.0**127)] * 100], F32)
    same(quantise.quantise_weight, reference.quantise_weight, w, "lsq", new_flag())


@pytest.mark.parametrize("shape", [(1, 1), (129, 5), (33, 260)], ids=str)
def test_a_weights_layout_is_its_transpose(shape: tuple[int, int]) -> None:
    found = quantise.quantise_weight(on_device(values(3, shape, "plain")), "max", on_device(new_flag()))
    assert found.layout.is_contiguous() and found.layout.numpy().tobytes() == found.hi.numpy().T.tobytes()


def test_another_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'min': it is one of"):
        quantise.quantise_weight(on_device(values(3, (2, 2), "plain")), "min", on_device(new_flag()))


def test_a_row_too_wide_for_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="16385 values"):
        quantise.quantise_rows(on_device(halves(3, (1, 16385), "plain")), 1, on_device(new_flag()))
