"""Figures of the account that people read."""

import math

import numpy as np
import pytest

from storage.account import unigram_entropy


def test_unigram_entropy_is_that_of_the_frequencies() -> None:
    assert unigram_entropy(np.array([[3, 3], [3, 3]], np.uint16)) == 0
    assert unigram_entropy(np.arange(8, dtype=np.uint16)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([0, 0, 0, 9])) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
