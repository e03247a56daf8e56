"""Embedding, norms, rotation and SwiGLU as Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from kernels.interface import Rope
from kernels.nvidia import layers, rotate, swiglu
from kernels.reference import new_flag
from tests.kernels.nvidia.rows import F32, KINDS, halves, same, values

EPS = F32(1e-5)
SHAPES = ((1, 1), (7, 17), (5, 129), (2, 704), (3, 2048))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding_and_its_backward(shape: tuple[int, int], kind: str) -> None:
    tokens = np.arange(shape[0]) % 3
    same(layers.embed, reference.embed, values(1, (5, shape[1]), kind), tokens)
    sums = np.full((5, shape[1]), 7, np.int64)
    same(layers.embed_backward, reference.embed_backward, halves(2, shape, kind), tokens, sums, new_flag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape: tuple[int, int], kind: str) -> None:
    x, gain = halves(3, shape, kind), values(4, shape[1:], "plain")
    same(layers.norm_bf16, reference.norm_bf16, x, gain, EPS, new_flag())
    for slices in (1, 2):
        same(layers.norm_rows, reference.norm_rows, x, gain, EPS, slices, new_flag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_backward(shape: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BACKWARD_PROGRAMS", 2)  # so that each takes several turns
    x, gain = halves(5, shape, "plain"), values(6, shape[1:], "plain")
    r, sums = np.abs(values(7, shape[:1], "plain")), np.full(shape[1], -3, np.int64)
    for residual in (None, halves(8, shape, "plain")):
        same(
            layers.norm_backward,
            reference.norm_backward,
            halves(9, shape, kind),
            x,
            r,
            gain,
            residual,
            sums,
            new_flag(),
        )


@pytest.mark.parametrize("reach", [2.0**25 - 2.0**17, 2.0**25])
def test_gradients_at_their_limit(reach: float) -> None:
    """Four terms of 2²⁵ reach 2²⁷: the flag, and 0; the bf16 just below is added."""
    dy = reference.numbers.bf16(np.full((4, 3), -reach, F32))
    same(layers.embed_backward, reference.embed_backward, dy, np.arange(4) % 2, np.zeros((2, 3), np.int64), new_flag())
    one, r, sums = reference.numbers.bf16(np.ones((4, 3), F32)), np.ones(4, F32), np.zeros(3, np.int64)
    same(layers.norm_backward, reference.norm_backward, dy, one, r, np.ones(3, F32), None, sums, new_flag())


def test_squares_beyond_float32() -> None:
    x = reference.numbers.bf16(np.full((2, 8), 2.0**64, F32))
    same(layers.norm_rows, reference.norm_rows, x, np.ones(8, F32), EPS, 1, new_flag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (6, 3, 16), (4, 2, 48), (5, 4, 128)])
def test_rotation_and_its_backward(tokens: int, heads: int, width: int, kind: str) -> None:
    angle = values(10, (max(1, tokens // 2), width // 2), "plain")  # two windows and more
    rope, y = Rope(np.cos(angle), np.sin(angle)), halves(11, (tokens, heads * width), kind)
    for query in (True, False):
        same(rotate.rotate_rows, reference.rotate_rows, y, rope, EPS, query, new_flag())
    dz = values(12, (tokens * heads, width), kind)
    same(rotate.rotate_backward, reference.rotate_backward, dz, y, rope, EPS, new_flag())
    same(rotate.rotate_backward, reference.rotate_backward, dz, halves(13, y.shape, "plain"), rope, EPS, new_flag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5632)], ids=str)
def test_swiglu_and_its_backward(shape: tuple[int, int], kind: str) -> None:
    gate_up, dh = halves(14, (shape[0], 2 * shape[1]), kind), halves(15, shape, "plain")
    for slices in (1, 2):
        same(swiglu.swiglu_rows, reference.swiglu_rows, gate_up, slices, new_flag())
    same(swiglu.swiglu_backward, reference.swiglu_backward, dh, gate_up)
    same(swiglu.swiglu_backward, reference.swiglu_backward, halves(16, shape, kind), halves(17, gate_up.shape, "plain"))
