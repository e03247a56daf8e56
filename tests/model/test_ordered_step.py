"""Steps whose reduction is ordered: what they add, in which order, on every backend; and that no other step does."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any, get_args

import numpy as np
import pytest

import kernels
from kernels import canonical, digest
from model import memory, ordered
from model.group import Alone
from model.host import mean_scale
from model.memory import KEEP_ALL, MemoryPlan
from model.ordered import Order, Residual
from model.ordered_ranks import Peers, own_mean, rank_mean
from model.ordered_step import replayed
from model.rows import Ownership, ownership
from model.spec import Exact, NumericsSpec, Ordered, RunSpec
from model.state import State, initial_state
from model.step import StepRecord, gradient_norm, gradients, step
from tests.model import tiny
from tests.model.mailboxes import on_all_ranks

BACKENDS = (*kernels.HOSTS, "generic:cpu")
SEQ_LEN, UNITS = 32, 12


def spec(reduction: Exact | Ordered, unit_windows: int = 1) -> RunSpec:
    numerics = NumericsSpec(reduction=reduction, unit_windows=unit_windows)
    return tiny.spec(seq_len=SEQ_LEN, windows=UNITS * unit_windows, steps=20, numerics=numerics)


def choice(replicas: int, shards: int, residual: Residual = "left_fold") -> Ordered:
    return Ordered(kind="ordered", replicas=replicas, shards=shards, residual=residual)


def done(
    run: RunSpec, name: str, windows: np.ndarray | None = None, plan: MemoryPlan = KEEP_ALL, steps: int = 1
) -> tuple[StepRecord, dict[str, np.ndarray], State]:
    """Some first steps: the last record, its gradient as it was lent, and the state after it."""
    backend = kernels.backend(name)
    state, taken = initial_state(run, backend), {}
    for number in range(steps):
        count = run.schedule.phases[0].windows
        given = tiny.windows(run, number * count, count) if windows is None else windows

        def take(gradient: dict[str, np.ndarray]) -> None:
            taken.update({key: array.copy() for key, array in gradient.items()})

        record = step(run, backend, state, given, diagnose=True, take=take, memory=plan)
    return record, taken, state


@cache
def units(unit_windows: int) -> tuple[list[dict[str, np.ndarray]], Any]:
    """The gradient f32 of each unit of the first step, by the exact step's own sums of that unit alone."""
    run, backend = spec(Exact(), unit_windows), kernels.backend("cpu")
    weights, found = initial_state(run, backend).weights, []
    for first in range(0, UNITS * unit_windows, unit_windows):
        sums = gradients(run, backend, weights, tiny.windows(run, first, unit_windows)).sums
        found.append({name: array.astype(np.float32) for name, array in sums.items()})
    return found, weights


@pytest.mark.parametrize("unit_windows", [1, 2])
def test_a_step_adds_its_units_as_the_order_says(unit_windows: int) -> None:
    """Written out for 2 × 3 ranks of two micro-batches each: unit u is of rank u mod 6."""
    half, third = np.float32(1) / np.float32(2), np.float32(1) / np.float32(3)
    expected = {}
    for name in units(unit_windows)[0][0]:
        g = [unit[name] for unit in units(unit_windows)[0]]
        rank = [g[r] * half + g[r + 6] * half for r in range(6)]
        nodes = [((rank[n] + rank[n + 1]) + rank[n + 2]) * third for n in (0, 3)]
        expected[name] = (nodes[0] + nodes[1]) * half
    record, taken, _ = done(spec(choice(2, 3), unit_windows), "cpu")
    assert {name: array.tobytes() for name, array in taken.items()} == {n: x.tobytes() for n, x in expected.items()}
    assert record.gradients == digest.tensor_digests(expected, digest.leaves_of(expected))
    norm = gradient_norm(kernels.backend("reference"), expected, mean_scale(unit_windows * SEQ_LEN))
    assert record.grad_norm == canonical.bits(norm)


def test_it_is_near_the_exact_mean_and_no_order_is_another() -> None:
    exact, sums, _ = done(spec(Exact()), "cpu")
    found = {"exact": exact.gradient}
    for shape in ((1, 1), (2, 2), (3, 1), (6, 1), (1, 4), (12, 1)):
        record, mean, _ = done(spec(choice(*shape)), "cpu")
        assert (record.loss, record.z_loss) == (exact.loss, exact.z_loss)
        for name, array in mean.items():
            difference = np.abs(array - sums[name] / UNITS).max()
            assert difference <= 4e-6 * max(np.abs(unit[name]).max() for unit in units(1)[0])
        found[str(shape)] = record.gradient
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_agree(name: str) -> None:
    run = spec(choice(3, 2))
    found, expected = (done(run, backend, steps=3) for backend in (name, "reference"))
    assert found[0] == expected[0] and found[0].diagnostics
    assert found[2].scalars() == expected[2].scalars()


@pytest.mark.slow
def test_no_memory_plan_changes_a_bit() -> None:
    run = spec(choice(3, 2))
    expected = done(run, "cpu")[0]
    for plan in memory.plans(run.model):
        if not plan.map_moments:
            assert done(run, "cpu", plan=plan)[0] == expected, plan


def test_the_order_of_units_counts() -> None:
    run = spec(choice(3, 1))
    windows = tiny.windows(run, 0, UNITS)
    moved = windows.copy()
    moved[[1, 2]] = windows[[2, 1]]  # to another rank each
    assert done(run, "cpu", moved)[0].gradient != done(run, "cpu", windows)[0].gradient
    exact = spec(Exact())
    assert done(exact, "cpu", moved)[0].gradient == done(exact, "cpu", windows)[0].gradient


def test_an_exact_step_adds_no_floats_over_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lower: np.ndarray, higher: np.ndarray) -> np.ndarray:
        raise AssertionError("floats of two units were added")

    monkeypatch.setattr(ordered, "float_add", refuse)
    assert done(spec(Exact()), "cpu")[0].gradient
    with pytest.raises(AssertionError, match="floats of two units"):
        done(spec(choice(1, 1)), "cpu")


def test_a_group_that_is_not_the_orders_is_refused() -> None:
    run, backend = spec(choice(2, 2)), kernels.backend("cpu")
    state = initial_state(run, backend)
    before = copy.deepcopy(state)
    group = Alone()
    group.size = 2
    with pytest.raises(ValueError, match=r"the number of processes is 2; allowed: 1 or 4 .*2 replicas × 2 shards"):
        step(run, backend, state, tiny.windows(run, 0, UNITS), group=group)
    assert state.step == 0 and state.weights["head"].tobytes() == before.weights["head"].tobytes()


@pytest.mark.parametrize("replicas", range(1, 10))
def test_ranks_end_with_the_rows_that_they_own(replicas: int) -> None:
    """Of a model whose tensors several ranks share and some rank owns nothing of, by threads."""
    model = tiny.spec(vocab=2003, d_model=64, layers=1).model

    @cache
    def sums(number: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(number)
        return {n: random.integers(-(2**50), 2**50, s) >> random.integers(0, 50, s) for n, s in model.shapes().items()}

    def own(rank: int, node: Peers, across: Peers, order: Order, rows: Ownership) -> dict[str, np.ndarray]:
        return own_mean(order, rows, node, across, rank_mean(order, rank, rows, sums))

    for shards in range(1, 9):
        order = Order(replicas, shards, 1 + (replicas + shards) % 2, get_args(Residual)[shards % 2])
        rows, whole = ownership(model, order.world), replayed(order, model.shapes(), sums)
        for rank, found in enumerate(on_all_ranks(order, partial(own, order=order, rows=rows))):
            assert {n: x.tobytes() for n, x in found.items()} == {
                name: whole[name][part].tobytes() for name, part in rows.own(rank).items()
            }
