"""The CPU attention gives the reference's bytes: for every shape, scale, thread count and product method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import pytest
import torch

from kernels.cpu import products
from kernels.cpu.attention import attention, visible_max
from kernels.cpu.attention_backward import attention_backward
from kernels.interface import Attended, AttentionShape, Rows
from kernels.reference.attention import attention as reference
from kernels.reference.attention import attention_backward as reference_backward
from kernels.reference.numbers import bf16
from kernels.reference.quantise import quantise

Case = tuple[Rows, Rows, Rows, np.ndarray]
LOG2_E = 1.4427


def rows(random: np.random.Generator, count: int, width: int, factor: np.ndarray | float = 1.0) -> Rows:
    """Quantised normal rows, each times its factor."""
    x = random.standard_normal((count, width)) * np.broadcast_to(factor, (count,))[:, None]
    return quantise(x.astype(np.float32), 1, np.zeros(1, np.int32))


def case(shape: AttentionShape, windows: int = 1, seed: int = 0) -> Case:
    """q, k, v and dO of ordinary size."""
    random, tokens = np.random.default_rng(seed), windows * shape.sequence
    q = rows(random, tokens * shape.heads, shape.width, LOG2_E / shape.width**0.5)
    k, v = (rows(random, tokens * shape.kv_heads, shape.width) for _ in range(2))
    d_out = random.standard_normal((tokens, shape.heads * shape.width)).astype(np.float32)
    return q, k, v, bf16(d_out)


def run(shape: AttentionShape, inputs: Case) -> tuple[list[np.ndarray], int]:
    """Forward and backward of the CPU backend, and the flag."""
    q, k, v, d_out = inputs
    flag = np.zeros(1, np.int32)
    saved = attention(q, k, v, shape)
    return [*saved, *attention_backward(q, k, v, saved, d_out, shape, flag)], int(flag[0])


def expected(shape: AttentionShape, inputs: Case) -> tuple[list[np.ndarray], int]:
    q, k, v, d_out = inputs
    flag = np.zeros(1, np.int32)
    saved = reference(q, k, v, shape)
    return [*saved, *reference_backward(q, k, v, saved, d_out, shape, flag)], int(flag[0])


def same(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    for name, a, b in zip((*Attended._fields, "dq", "dk", "dv"), left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert a.tobytes() == b.tobytes(), f"{name}: {np.count_nonzero(a != b)} of {a.size} values differ"


def check(shape: AttentionShape, inputs: Case, flag: int = 0) -> None:
    (got, got_flag), (want, want_flag) = run(shape, inputs), expected(shape, inputs)
    same(got, want)
    assert (got_flag, want_flag) == (flag, flag)


SHAPES = [  # heads, key/value heads, width, sequence, window; windows of the unit
    *((AttentionShape(3, 1, 64, n, n), 1) for n in (1, 2, 63, 64, 65, 127, 128, 129)),
    *((AttentionShape(3, 1, 64, n, 16), 1) for n in (63, 129, 513)),
    (AttentionShape(1, 1, 64, 129, 1), 1),
    (AttentionShape(2, 2, 16, 65, 512), 2),
    (AttentionShape(4, 1, 128, 513, 512), 1),
    (AttentionShape(8, 2, 16, 300, 128), 1),
    (AttentionShape(6, 2, 128, 257, 4096), 2),
    (AttentionShape(4, 4, 64, 200, 127), 1),
]


@pytest.mark.parametrize(("shape", "windows"), SHAPES)
def test_every_shape(shape: AttentionShape, windows: int) -> None:
    check(shape, case(shape, windows))


@pytest.mark.parametrize("window", [512, 4096])
def test_full_length(window: int) -> None:
    shape = AttentionShape(1, 1, 64, 4096, window)
    check(shape, case(shape))


def test_scales_of_all_sizes_and_zero_rows() -> None:
    """Rows of q and k from 2⁻⁶⁶ (zero) to 2⁶, values to 2⁴⁰, gradients down to the least bf16 kept and up to 2⁶⁰."""
    shape, random = AttentionShape(4, 2, 64, 150, 100), np.random.default_rng(1)
    q = rows(random, 600, 64, np.exp2(random.integers(-66, 7, 600).astype(float)))
    k = rows(random, 300, 64, np.exp2(random.integers(-66, 7, 300).astype(float)))
    v = rows(random, 300, 64, np.exp2(random.integers(-70, 41, 300).astype(float)))
    d_out = random.standard_normal((600, 64)) * np.exp2(random.integers(-110, 61, 600).astype(float))[:, None]
    for zero in (q, k, v):
        zero.hi[:7], zero.scale[:7] = 0, 0
    d_out[5:9] = 0
    check(shape, (q, k, v, bf16(d_out.astype(np.float32).reshape(150, -1))))


def test_sharp_rows() -> None:
    """Scores far apart: most probabilities fall below 2⁻³² and are 0."""
    shape, random = AttentionShape(3, 1, 64, 200, 200), np.random.default_rng(2)
    _, k, v, d_out = case(shape, seed=3)
    check(shape, (rows(random, 600, 64, 30.0), k, v, d_out))


def test_gradients_that_are_not_finite_raise_the_flag_and_count_as_zero() -> None:
    shape = AttentionShape(3, 1, 64, 130, 50)
    q, k, v, d_out = case(shape, seed=4)
    d_out[3, 5], d_out[70, 100], d_out[129, 191] = 0x7F80, 0x7FC0, 0xFF80
    check(shape, (q, k, v, d_out), flag=1)


def test_scores_gradients_that_overflow_raise_the_flag() -> None:
    """dP beyond float32 everywhere: dS holds no finite row or column, while dV stays finite."""
    shape, random = AttentionShape(3, 1, 64, 70, 70), np.random.default_rng(5)
    q, k, _, _ = case(shape, seed=5)
    v = rows(random, 70, 64, 2.0**100)
    d_out = bf16((random.standard_normal((70, 192)) * 2.0**100).astype(np.float32))
    check(shape, (q, k, v, d_out), flag=1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def test_threads_and_product_methods_change_no_bit() -> None:
    shape = AttentionShape(3, 1, 64, 513, 512)
    inputs, method = case(shape, 2, seed=6), products.method()
    want, _ = run(shape, inputs)
    for count in (1, 2, 3):
        with threads(count):
            same(run(shape, inputs)[0], want)
    try:
        products.use("float32")
        same(run(shape, inputs)[0], want)
    finally:
        products.use(method)


def test_later_tokens_change_nothing_before_them() -> None:
    """Not even through a scale: outputs up to a token keep their bytes whatever follows it."""
    shape, cut = AttentionShape(3, 1, 64, 200, 60), 130
    one, other = case(shape, seed=7), case(shape, seed=8)
    mixed = [Rows(b.hi.copy(), None, b.scale * np.float32(64)) for b in other[:3]]
    for to, source, heads in zip(mixed, one[:3], (3, 1, 1), strict=True):
        to.hi[: cut * heads], to.scale[: cut * heads] = source.hi[: cut * heads], source.scale[: cut * heads]
    for a, b in zip(attention(*one[:3], shape), attention(*mixed, shape), strict=True):
        assert a[:cut].tobytes() == b[:cut].tobytes()


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 100, 1000])
def test_visible_max(window: int) -> None:
    scale = np.random.default_rng(9).random(100, np.float32)
    want = [scale[max(0, i - window + 1) : i + 1].max() for i in range(100)]
    assert np.array_equal(visible_max(scale, window), np.array(want, np.float32))
