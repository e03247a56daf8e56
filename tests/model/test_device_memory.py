"""What the 1.608 B shape takes of a GPU: against what was measured, and by plans."""

import pytest

from model import device_memory, memory
from model.memory import KEEP_ALL
from model.spec import NumericsSpec, Ordered
from tests.bench.shapes import OPEN_1B, run_of
from tests.model.recipes import run_spec

GB = 10**9
MEASURED = {1: 44.6, 4: 73.6}  # windows of a unit → the peak in GB of steps that keep everything, on an H200


def one_slice(windows: int) -> NumericsSpec:
    """What was measured."""
    return NumericsSpec(weight_gradient_slices=1, unit_windows=windows)


def test_the_shape_is_the_recipe_s() -> None:
    assert run_spec("open_1b").model == OPEN_1B


@pytest.mark.parametrize("windows", MEASURED)
def test_what_was_measured(windows: int) -> None:
    said = memory.total(device_memory.needs(run_of(OPEN_1B, 32, one_slice(windows)), KEEP_ALL, "training"))
    assert 0 <= said - MEASURED[windows] * GB < 1.5 * GB  # of which 0.5 are the program


def test_the_fastest_plan_that_fits() -> None:
    run = run_of(OPEN_1B, 32, one_slice(4))
    order = [memory.choose(run, "training", room * GB, device_memory.needs) for room in (131, 73, 53, 51, 49)]
    assert order[0] == KEEP_ALL and order[-1] is None
    slower = [plan.slowdown() for plan in order if plan is not None]
    assert slower == sorted(slower) and slower[1] > 1 and slower[-1] > slower[1]
    assert not any(plan.map_moments for plan in order if plan is not None)


def test_each_piece_counts_what_it_has() -> None:
    run = run_spec("open_1b")
    found = {piece: device_memory.needs(run, KEEP_ALL, piece) for piece in memory.PIECES}
    assert "moments" not in found["unit"] and found["step"]["moments"] == 2 * found["step"]["weights"]
    assert found["training"]["sums"] == 2 * found["training"]["weights"] and "sums" not in found["initial"]
    hosts = [device_memory.on_host(run, piece) for piece in ("initial", "unit", "training", "step")]
    assert hosts == sorted(hosts) and hosts[1] < hosts[2] < hosts[3]


def test_an_ordered_reduction_is_done_on_the_host() -> None:
    """Of 6 replicas: a unit's sums i64 and f32, a rank's mean, and TreeFold's four."""
    run = run_of(OPEN_1B, 32, one_slice(4))
    order = Ordered(kind="ordered", replicas=6, shards=8, residual="left_fold")
    ordered = run.model_copy(update={"numerics": run.numerics.model_copy(update={"reduction": order})})
    for piece in memory.PIECES:
        more = device_memory.on_host(ordered, piece) - device_memory.on_host(run, piece)
        held = 8 + 4 * (2 + 4) if piece in ("training", "step") else 0
        assert more == held * OPEN_1B.parameter_count()
        assert device_memory.needs(ordered, KEEP_ALL, piece) == device_memory.needs(run, KEEP_ALL, piece)
