"""The NVIDIA attention gives the reference's bytes, kernel by kernel in Triton's interpreter."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from kernels.interface import Attended, AttentionShape, Rows
from kernels.nvidia.attention import attention
from kernels.nvidia.attention_backward import attention_backward
from kernels.reference.attention import attention as reference
from kernels.reference.attention import attention_backward as reference_backward
from kernels.reference.numbers import bf16
from kernels.reference.quantise import quantise
from tests.kernels.nvidia.rows import on_device

Case = tuple[Rows, Rows, Rows, np.ndarray]
SHAPES = [  # heads, key/value heads, width, sequence, window; windows of the unit
    (AttentionShape(3, 1, 64, 1, 5), 1),
    (AttentionShape(2, 1, 16, 17, 9), 2),
    (AttentionShape(1, 1, 48, 64, 1), 1),
    (AttentionShape(2, 2, 128, 65, 512), 1),
    (AttentionShape(3, 1, 16, 70, 30), 1),
    (AttentionShape(1, 1, 64, 100, 97), 1),
    (AttentionShape(1, 1, 16, 160, 4096), 1),
    (AttentionShape(1, 1, 16, 200, 130), 1),
    (AttentionShape(1, 1, 16, 300, 66), 1),
]


def rows(random: np.random.Generator, count: int, width: int, factor: np.ndarray | float = 1.0) -> Rows:
    """Quantised normal rows, each times its factor."""
    x = random.standard_normal((count, width)) * np.broadcast_to(factor, (count,))[:, None]
    return quantise(x.astype(np.float32), 1, np.zeros(1, np.int32))


def case(shape: AttentionShape, windows: int = 1, seed: int = 0) -> Case:
    """q, k, v and dO; values and gradients of many sizes."""
    random, tokens = np.random.default_rng(seed), windows * shape.sequence
    q = rows(random, tokens * shape.heads, shape.width, 1.4427 / shape.width**0.5)
    k = rows(random, tokens * shape.kv_heads, shape.width)
    v = rows(random, tokens * shape.kv_heads, shape.width, np.exp2(random.integers(-9, 9, tokens * shape.kv_heads)))
    factor = np.exp2(random.integers(-9, 9, (tokens, 1)))
    d_out = random.standard_normal((tokens, shape.heads * shape.width)) * factor
    return q, k, v, bf16(d_out.astype(np.float32))


def run(shape: AttentionShape, inputs: Case) -> tuple[list[bytes], int]:
    """Forward and backward of the kernels, and the flag."""
    q, k, v, d_out = map(on_device, inputs)
    flag = torch.zeros(1, dtype=torch.int32)
    with np.errstate(all="ignore"):  # the interpreter computes what is masked later, too
        saved = attention(q, k, v, shape)
        gradients = attention_backward(q, k, v, saved, d_out, shape, flag)
    return [x.numpy().tobytes() for x in (*saved, *gradients)], int(flag[0])


def expected(shape: AttentionShape, inputs: Case) -> tuple[list[bytes], int]:
    q, k, v, d_out = inputs
    flag = np.zeros(1, np.int32)
    with np.errstate(all="ignore"):
        saved = reference(q, k, v, shape)
        gradients = reference_backward(q, k, v, saved, d_out, shape, flag)
    return [x.tobytes() for x in (*saved, *gradients)], int(flag[0])


def check(shape: AttentionShape, inputs: Case, flag: int = 0) -> None:
    (got, got_flag), (want, want_flag) = run(shape, inputs), expected(shape, inputs)
    for name, a, b in zip((*Attended._fields, "dq", "dk", "dv"), got, want, strict=True):
        assert a == b, f"{name}: {sum(x != y for x, y in zip(a, b, strict=True))} of {len(b)} bytes differ"
    assert (got_flag, want_flag) == (flag, flag)


@pytest.mark.parametrize(("shape", "windows"), SHAPES)
def test_every_shape(shape: AttentionShape, windows: int) -> None:
    check(shape, case(shape, windows))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
def test_heads_whose_tiles_do_not_fit_follow_one_another(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four groups of two heads; a head of 200 tokens with a window of 60 has 7 tiles, two by most blocks of queries."""
    module = importlib.import_module("kernels.nvidia.attention_backward")
    monkeypatch.setattr(module, "STORED", groups * 2 * 7 * 64 * 64 * 8)
    shape = AttentionShape(4, 2, 16, 200, 60)
    check(shape, case(shape, 2))


def test_scales_of_all_sizes_and_zero_rows() -> None:
    """Rows of q and k from 2⁻⁶⁶ (zero) to 2⁶, values to 2⁴⁰, gradients down to the least bf16 kept and up to 2⁶⁰."""
    shape, random = AttentionShape(2, 1, 16, 60, 50), np.random.default_rng(1)
    q = rows(random, 120, 16, np.exp2(random.integers(-66, 7, 120).astype(float)))
    k = rows(random, 60, 16, np.exp2(random.integers(-66, 7, 60).astype(float)))
    v = rows(random, 60, 16, np.exp2(random.integers(-70, 41, 60).astype(float)))
    d_out = random.standard_normal((120, 16)) * np.exp2(random.integers(-110, 61, 120).astype(float))[:, None]
    for zero in (q, k, v):
        zero.hi[:7], zero.scale[:7] = 0, 0
    d_out[5:9] = 0
    check(shape, (q, k, v, bf16(d_out.astype(np.float32).reshape(60, -1))))


def test_sharp_rows() -> None:
    """Scores far apart: most probabilities fall below 2⁻³² and are 0, and whole columns with them."""
    shape, random = AttentionShape(2, 1, 16, 60, 60), np.random.default_rng(2)
    _, k, v, d_out = case(shape, seed=3)
    check(shape, (rows(random, 120, 16, 30.0), k, v, d_out))


def test_gradients_that_are_not_finite_raise_the_flag_and_count_as_zero() -> None:
    shape = AttentionShape(2, 1, 16, 60, 50)
    q, k, v, d_out = case(shape, seed=4)
    d_out[3, 5], d_out[40, 20], d_out[59, 31] = 0x7F80, 0x7FC0, 0xFF80
    check(shape, (q, k, v, d_out), flag=1)


@pytest.mark.parametrize(("share", "sharpness"), [(1.0, 1.0), (0.05, 1.0), (0.05, 100.0)])
def test_scores_gradients_that_overflow_raise_the_flag(share: float, sharpness: float) -> None:
    """dP beyond float32 everywhere or in some places: rows and columns of dS hold ∞, or, where P is 0, nothing that is
    not finite but NaN; dV stays finite."""
    shape, random = AttentionShape(2, 1, 16, 60, 20), np.random.default_rng(5)
    _, k, _, _ = case(shape, seed=5)
    q = rows(random, 120, 16, sharpness)
    v = rows(random, 60, 16, np.where(random.random(60) < share, 2.0**100, 1.0))
    d_out = random.standard_normal((60, 32)) * np.where(random.random((60, 1)) < 2 * share, 2.0**100, 1.0)
    check(shape, (q, k, v, bf16(d_out.astype(np.float32))), flag=1)


def test_heads_too_wide_for_a_sum_are_refused() -> None:
    """Of 1,024 channels a product of both slices may leave int32; 512 are too many for a block's shared memory."""
    shape = AttentionShape(1, 1, 1024, 3, 3)
    with pytest.raises(ValueError, match="1024 channels"):
        run(shape, case(shape))
