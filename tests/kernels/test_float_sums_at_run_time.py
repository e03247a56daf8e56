"""The guard sees what it must see; real steps run under it in the tests of the step function's backends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.kernels import float_guard

X = np.ones((3, 3), np.float32)
T = torch.ones(3, 3)


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
