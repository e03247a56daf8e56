"""Memory plans: none changes a bit, each takes what it says, and the fastest that fits is chosen."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels import canonical
from kernels.reference.philox import words
from model import diagnostics, memory
from model.memory import KEEP_ALL, MemoryPlan
from model.spec import NumericsSpec, RunSpec
from model.state import initial_state
from model.step import StepRecord, evaluate, step
from model.transformer import network
from tests.model import peak, rank_peaks, tiny
from tests.model.recipes import run_spec

BACKENDS = (*kernels.HOSTS, "generic:cpu")
GB = 10**9
LEAN = MemoryPlan(1, copy_state=False)


def one_step(run: RunSpec, name: str, plan: MemoryPlan) -> tuple[StepRecord, str | None]:
    """A step under a plan, everything that it reports, and the held-out loss of the state after it."""
    backend = kernels.backend(name)
    state = initial_state(run, backend)
    record = step(run, backend, state, tiny.windows(run, 0, 2), diagnose=True, memory=plan)
    return record, evaluate(run, backend, state, tiny.windows(run, 100, 1), plan)


@pytest.mark.parametrize("name", BACKENDS)
def test_no_plan_changes_a_bit(name: str) -> None:
    numerics = NumericsSpec(weight_scale="lsq", down_slices=2, unit_windows=2)
    run = tiny.spec(numerics=numerics, peak_lr="0.1")
    run = run.model_copy(update={"schedule": run.schedule.model_copy(update={"warmup_tokens": 0})})
    expected = one_step(run, name, KEEP_ALL)
    assert expected[0].gradient is not None and expected[0].diagnostics is not None
    assert canonical.from_bits(expected[0].lr) > 0.09  # codes made after the update would show in the diagnostics
    backend = kernels.backend(name)
    before = diagnostics.codes(network(run, backend, initial_state(run, backend).weights, backend.new_flag()))
    assert all(codes.items() <= expected[0].diagnostics[name].items() for name, codes in before.items())
    for plan in memory.plans(run.model):
        if not plan.map_moments:
            assert one_step(run, name, plan) == expected, plan


@pytest.mark.parametrize("name", BACKENDS)
def test_the_gradient_of_gate_and_up_takes_their_place(name: str) -> None:
    backend = kernels.backend(name)
    drawn = words(1, "gate and up", 0, 130 * 3 * 80).astype(np.float32) * np.float32(2.0**-31) - np.float32(1)
    values = (drawn.view(np.uint32) >> 16).astype(np.uint16).reshape(130, 3 * 80)
    dh, gate_up = (backend.to_device(values[:, part].copy()) for part in (slice(0, 80), slice(80, None)))
    found = backend.swiglu_backward(dh, gate_up)
    assert np.array_equal(backend.to_host(gate_up), backend.to_host(found))
    assert len(np.unique(backend.to_host(found))) > 1000


def test_the_fastest_plan_that_fits() -> None:
    run = run_spec("open_1b")
    order = [memory.choose(run, "step", available * GB) for available in (60, 44, 40, 25, 24, 23, 16)]
    assert order[0] == KEEP_ALL and order[-1] is None
    slower = [plan.slowdown() for plan in order if plan is not None]
    assert slower == sorted(set(slower))  # each takes less than the one before, and is slower


@pytest.mark.parametrize("piece", memory.PIECES)
def test_a_plan_needs_less_the_less_it_keeps(piece: memory.Piece) -> None:
    run = run_spec("open_1b")

    def total(plan: MemoryPlan) -> int:
        return memory.total(memory.needs(run, plan, piece))

    least = memory.leanest(run, piece)
    assert total(least) <= total(replace(least, hold_codes=True)) and total(least) <= total(KEEP_ALL)
    assert memory.choose(run, piece, total(least)) is not None
    assert memory.choose(run, piece, total(least) - 1) is None
    assert memory.on_disk(run, least, piece) == (8 * run.model.parameter_count() if least.map_moments else 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak since a time")
@pytest.mark.parametrize(
    ("piece", "plan", "replicas"),
    [
        ("unit", KEEP_ALL, 0),
        ("unit", MemoryPlan(2, hold_codes=False), 0),
        ("step", MemoryPlan(1, hold_codes=False), 0),
        ("step", KEEP_ALL, 4),
        ("step", KEEP_ALL, 7),
    ],
)
def test_a_piece_takes_no_more_than_was_said_and_not_much_less(
    piece: memory.Piece, plan: MemoryPlan, replicas: int
) -> None:
    said = memory.total(memory.needs(peak.spec(replicas), plan, piece))
    asked = [piece, str(plan.recompute), "hold" if plan.hold_codes else "no", str(replicas)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.peak", *asked], capture_output=True, text=True, check=True
    )
    took = json.loads(done.stdout)
    assert took <= said <= took / 0.75, f"said {said / 1e6:,.0f} MB, took {took / 1e6:,.0f} MB"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak since a time")
@pytest.mark.parametrize(("processes", "plan"), [(2, KEEP_ALL), (3, LEAN)])
def test_ranks_take_no_more_than_was_said_and_not_much_less(processes: int, plan: MemoryPlan) -> None:
    said = memory.total(memory.needs(rank_peaks.spec(processes), plan, "training", processes))
    asked = [str(processes), str(plan.recompute), "beside" if plan.copy_state else "not"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.rank_peaks", *asked], capture_output=True, text=True, check=True
    )
    took = json.loads(done.stdout)
    assert took <= said <= took / 0.75, f"said {said / 1e6:,.0f} MB, took {took / 1e6:,.0f} MB"


def test_ranks_share_the_state_and_hold_the_rest_whole() -> None:
    run = run_spec("open_1b")
    one, two, eight = (memory.needs(run, KEEP_ALL, "training", processes) for processes in (1, 2, 8))
    for purpose, whole in (("weights", 4), ("moments", 8), ("copy", 12)):
        for found in (one, two, eight):  # of all together; ranks own alike to a few blocks of rows
            assert 0 <= found[purpose] / (whole * run.model.parameter_count()) - 1 < 0.01
    assert two["codes"] == 2 * one["codes"] and eight["sums"] == 8 * one["sums"] and "gathered" not in one
    assert two["gathered"] == eight["gathered"] == 12 * run.model.parameter_count()
    in_place = memory.needs(run, LEAN, "training", 2)
    assert "copy" not in in_place and in_place.get("gathered", 0) < two["gathered"]
