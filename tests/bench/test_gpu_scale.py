"""How times become efficiencies."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.bench.gpu_scale import figures


def test_efficiency_is_one_gpus_time_over_the_share_of_many() -> None:
    asked = Namespace(windows=64, recipe=1152)
    one = {"times": {"strong": [5.0, 4.0, 3.0], "longer": [13.0]}}  # 1 s a step and 3/64 s a window
    two = {"times": {"strong": [2.5], "weak": [5.0], "recipe": [27.5]}, "recipe": {"reduce": 0.1}}
    first, second = figures({1: {"ours": one}, 2: {"ours": two}}, asked)
    assert first["seconds"]["recipe"] == pytest.approx(1 + 3 * 1152 / 64)
    assert second["efficiency"] == pytest.approx({"strong": 4 / 2 / 2.5, "weak": 4 / 5, "recipe": 55 / 2 / 27.5})
    assert second["recipe"] == {"reduce": 0.1}
