"""Real steps run with every sum of floats forbidden; and the guard sees what it must see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kernels
from kernels.cpu import products
from model.state import initial_state
from model.step import evaluate, step
from tests.kernels import float_guard
from tests.model import tiny

X = np.ones((3, 3), np.float32)
T = torch.ones(3, 3)


@pytest.mark.parametrize("name", kernels.HOSTS)
def test_a_step_sums_no_floats(name: str) -> None:
    run, backend = tiny.spec(), kernels.backend(name)
    state = initial_state(run, backend)
    step(run, backend, state, tiny.windows(run, 0, 2))  # compiles what it needs, which is no part of a step
    with float_guard.forbidden():
        record = step(run, backend, state, tiny.windows(run, 2, 2), diagnose=True)
        assert record.loss is not None
        assert evaluate(run, backend, state, tiny.windows(run, 4, 1)) is not None


def test_a_product_in_a_block_of_the_cpu_backend_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take the blocks otherwise, where nothing watches."""

    def inexact(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[...] = torch.mm(torch.from_numpy(a) * 0.5, torch.from_numpy(b.copy()) * 0.5).numpy()

    b = kernels.backend("cpu")
    x = b.quantise_rows(np.full((1000, 8), 0x3F80, np.uint16), 1, b.new_flag())
    w = b.quantise_weight(np.ones((4, 8), np.float32), "max", b.new_flag())
    monkeypatch.setattr(products, "_method", inexact)
    b.project(x, w)
    with float_guard.forbidden(), pytest.raises(float_guard.FloatSum):
        b.project(x, w)


@pytest.mark.parametrize(
    "offence",
    [
        lambda: X.sum(),
        lambda: np.sum(X, axis=0),
        lambda: X.mean(),
        lambda: np.add.reduce(X),
        lambda: np.cumsum(X),
        lambda: np.einsum("ij,jk->ik", X, X),
        lambda: np.linalg.norm(X),
        lambda: T.sum(),
        lambda: T.mean(),
        lambda: T.cumsum(0),
        lambda: torch.softmax(T, 0),
        lambda: (T * 0.5) @ T,
        lambda: torch.nn.functional.linear(T, T * 0.3),
    ],
)
def test_sums_of_floats_raise(offence: Callable[[], object]) -> None:
    with float_guard.forbidden(), pytest.raises(float_guard.FloatSum):
        offence()


def test_sums_of_integers_and_exact_products_pass() -> None:
    with float_guard.forbidden():
        assert np.sum(np.arange(4), dtype=np.int64) == 6
        assert np.sum(np.rint(X).astype(np.int64), axis=0, dtype=np.int64).tolist() == [3, 3, 3]
        assert np.max(X) == 1
        assert (T @ T)[0, 0] == 3
