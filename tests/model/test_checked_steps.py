"""Rule 4 while a model trains: outputs keep their floors on every backend, subnormals make no difference inside."""

from __future__ import annotations

from types import ModuleType

import pytest

import kernels
from model.spec import NumericsSpec
from model.step import StepRecord, step
from tests.kernels import sinks
from tests.model import tiny, wild

BACKENDS = (*kernels.HOSTS, "generic:cpu")
NUMERICS = {"least": tiny.LEAST, "default": NumericsSpec(), "down": NumericsSpec(down_slices=2)}


def train(backend: ModuleType, count: int, numerics: NumericsSpec) -> list[StepRecord]:
    run = tiny.spec(numerics=numerics)
    state = wild.state(run)
    return [step(run, backend, state, wild.windows(run, state.step)) for _ in range(count)]


@pytest.mark.slow
def test_wild_weights_keep_their_promises_on_every_backend() -> None:
    expected = train(kernels.backend("cpu"), 20, NUMERICS["least"])
    assert {record.event for record in expected} == {""}
    for name in BACKENDS:
        assert train(kernels.backend(f"checked:{name}"), 20, NUMERICS["least"]) == expected, name


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_a_flushed_subnormal_changes_nothing_in_the_reference(numerics: NumericsSpec) -> None:
    expected = train(kernels.backend("cpu"), 4, numerics)
    with sinks.asserted() as met:
        assert train(kernels.backend("checked:reference"), 4, numerics) == expected
    assert all(met[name] > 0 for name in ("bf16", "split", "fixed_sum", "fixed_point", "scale_and_inverse")), met
