"""The polynomials' constants in Triton kernels are the contract's."""

from __future__ import annotations

import pytest

from kernels.nvidia import elementary
from kernels.reference import constants


@pytest.mark.parametrize("name", ["EXP2", "LOG2"])
def test_coefficients(name: str) -> None:
    assert getattr(elementary, name) == [float(c) for c in getattr(constants, name)]


@pytest.mark.parametrize("name", ["LOG2_E", "LN_2", "ROOT_HALF_BITS"])
def test_numbers(name: str) -> None:
    assert getattr(elementary, name).value == getattr(constants, name)
