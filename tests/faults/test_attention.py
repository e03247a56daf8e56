"""A window's gradients are a function of the window: not of the run, of its neighbours, or of who came first."""

from __future__ import annotations

import numba
import numpy as np
import pytest

import kernels
from kernels.digest import tensor_digest
from kernels.interface import Attended, AttentionShape, Rows
from kernels.reference.numbers import bf16

SHAPE = AttentionShape(heads=4, kv_heads=2, width=16, sequence=17, window=9)
MANY, REPEATS = 32, 20
Arrays = dict[str, np.ndarray]


def inputs() -> Arrays:
    """q, k, v and dO of MANY windows, in bf16 bits."""
    random, tokens = np.random.default_rng(4), MANY * SHAPE.sequence
    heads = {"q": SHAPE.heads, "k": SHAPE.kv_heads, "v": SHAPE.kv_heads}
    drawn = {name: random.standard_normal((tokens * count, SHAPE.width)) for name, count in heads.items()}
    drawn["d"] = random.standard_normal((tokens, SHAPE.heads * SHAPE.width))
    return {name: bf16(x.astype(np.float32)) for name, x in drawn.items()}


def backward(name: str, arrays: Arrays) -> list[np.ndarray]:
    """dq, dk and dv of a unit that consists of these windows."""
    b = kernels.backend(name)
    flag = b.new_flag()
    q, k, v = (b.quantise_rows(b.to_device(arrays[part]), 1, flag) for part in "qkv")
    q = Rows(q.hi, q.lo, b.to_device(b.to_host(q.scale) * np.float32(0.2)))
    saved: Attended = b.attention(q, k, v, SHAPE)
    gradients = b.attention_backward(q, k, v, saved, b.to_device(arrays["d"]), SHAPE, flag)
    assert not b.to_host(flag)[0]
    return [b.to_host(gradient) for gradient in gradients]


def by_window(gradients: list[np.ndarray], windows: int) -> list[tuple[str, ...]]:
    """The digests of dq, dk and dv of each window."""
    parts = [gradient.reshape(windows, -1) for gradient in gradients]
    return [tuple(tensor_digest("window", part[w]) for part in parts) for w in range(windows)]


@pytest.mark.slow
@pytest.mark.parametrize("name", (*kernels.HOSTS, "generic:cpu"))
def test_attention_backward_repeats_alone_and_among_others(name: str) -> None:
    """dQ differed from run to run: its parts were added by atomics, in the order in which blocks happened to end."""
    arrays = inputs()
    alone = {part: x.reshape(MANY, -1, x.shape[1])[7] for part, x in arrays.items()}
    single, unit = set(), set()
    threads = numba.get_num_threads()
    try:
        for repeat in range(REPEATS):
            numba.set_num_threads(1 + repeat % threads)
            single.add(tuple(by_window(backward(name, alone), 1)))
            unit.add(tuple(by_window(backward(name, arrays), MANY)))
    finally:
        numba.set_num_threads(threads)
    assert len(single) == len(unit) == 1
    (window,), windows = single.pop(), unit.pop()
    assert windows[7] == window
    assert len(set(windows)) == MANY


@pytest.mark.parametrize("name", (*kernels.HOSTS, "generic:cpu"))
def test_neighbours_change_nothing(name: str) -> None:
    """The same cause, seen from the other side: what else is in the batch decided how many blocks there were."""
    arrays = inputs()
    before = by_window(backward(name, arrays), MANY)
    order = [*range(1, 8), 7, *[0] * (MANY - 8)]
    for part, x in arrays.items():
        arrays[part] = x.reshape(MANY, -1)[order].reshape(x.shape)
    assert by_window(backward(name, arrays), MANY) == [before[window] for window in order]
