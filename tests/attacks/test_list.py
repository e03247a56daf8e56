"""The list of attacks is whole: every test that it names is there and says what it ended in."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.attacks import ATTACKS, TWINS, VERDICTS


def test_there_are_twenty_attacks_each_with_a_twin() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) == 20
    assert all(attack.tests and attack.twin in TWINS for attack in ATTACKS)
    assert sum(len(attack.tests) for attack in ATTACKS) + len(TWINS) == len(VERDICTS)  # no test shows two


@pytest.mark.parametrize("test", VERDICTS)
def test_each_named_test_says_what_it_ended_in(test: str) -> None:
    file, _, name = test.partition("::")
    function, _, case = name.partition("[")
    found = getattr(importlib.import_module(f"tests.attacks.{file.removesuffix('.py')}"), function)
    assert "ends" in inspect.signature(found).parameters
    if case:
        (marked,) = (mark for mark in found.pytestmark if mark.name == "parametrize")
        assert case.removesuffix("]") in [getattr(each, "values", (each,))[0] for each in marked.args[1]]
