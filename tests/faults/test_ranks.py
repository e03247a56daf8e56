"""How many ranks there are, what each has done before, and how it groups its work: none of it is an input."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
import torch.distributed as dist

import kernels
from kernels.cpu import pool, products
from model import schedule
from model.spec import RunSpec
from model.state import State, initial_state, root
from model.step import StepRecord, step
from tests.faults import ranks, whole_step
from tests.model import tiny

FAST = ("cpu", "generic:cpu")
WORLDS = (1, 2, 3, 4, 6)
TINY = np.array([1e-19, -9e-20, 1e-20, -1e-30, 2.0**-63, -(2.0**-64), 2.0**-100, 2.0**-126, 1e-39, -1e-45], np.float32)


def train(run: RunSpec, name: str, state: State, count: int) -> list[StepRecord]:
    backend, records = kernels.backend(name), []
    for _ in range(count):
        plan = schedule.plan(run, state.step)
        windows = tiny.windows(run, plan.first_window, plan.windows)
        records.append(step(run, backend, state, windows))
    return records


def trajectory(records: list[StepRecord]) -> list[list[str | None]]:
    return [whole_step.digests(record) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_world_sizes_give_one_state(name: str) -> None:
    """The loss differed between degrees of parallelism: random numbers and sums followed the layout of the shards."""
    run = tiny.spec(windows=12, seq_len=32, layers=2)
    found = []
    for world in WORLDS:
        state = initial_state(run, kernels.backend(name))
        with ranks.simulated(world):
            found.append([root(state)[0], trajectory(train(run, name, state, 3))])
    assert all(other == found[0] for other in found)
    plain = initial_state(run, kernels.backend("reference"))
    assert found[0] == [root(plain)[0], trajectory(train(run, "reference", plain, 3))]


@pytest.mark.parametrize("name", (*kernels.HOSTS, "generic:cpu"))
def test_a_shard_s_initial_weights_are_those_of_the_whole(name: str) -> None:
    """Initial weights depended on the layout: a generator was drawn from in the order of a rank's own elements."""
    b = kernels.backend(name)
    draw = {rows: b.to_host(b.initial_weights(3, "blocks.000.q", (rows, 37), np.float32(0.02))) for rows in (5, 60)}
    assert draw[60][:5].tobytes() == draw[5].tobytes()


def seeded(run: RunSpec) -> State:
    """An initial state with values below 1e-19, subnormal ones too, all over weights and moments."""
    state = initial_state(run, kernels.backend("cpu"))
    for seed, (name, array) in enumerate(sorted(state.tensors().items())):
        random = np.random.default_rng(seed)
        places = random.random(array.shape) < 0.2
        values = random.choice(TINY, array.shape)
        array[places] = (np.abs(values) if name.startswith("v/") else values)[places]
    return state


@pytest.mark.slow
def test_hundred_steps_in_any_grouping_from_tiny_values() -> None:
    """Two machines forked at step 15: a power function rounded differently; others through tables and subnormals."""
    run = tiny.spec(windows=6, seq_len=16, layers=1, window=8, vocab=53, d_model=16, ffn=24, heads=1)
    expected = trajectory(train(run, "reference", seeded(run), 100))
    for world, accumulate in ((1, 6), (2, 3), (3, 1), (6, 1)):
        with ranks.simulated(world, accumulate):
            assert trajectory(train(run, "cpu", seeded(run), 100)) == expected, (world, accumulate)
    assert len({state for state, *_ in expected}) == 100


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Any]]:
    """A process group that exists while the test runs, and is destroyed after it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield [dist.new_group([0]) for _ in range(3)]
    dist.destroy_process_group()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks run in this thread, so that its scratch arrays are all that there are."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    monkeypatch.setattr(pool, "_workers", None)  # who asks for them all the same fails
    yield
    numba.set_num_threads(before)


def history(groups: list[Any]) -> None:
    """What a long life leaves behind: groups that came and went, freed memory full of NaN, used scratch arrays."""
    for group in groups:
        dist.all_reduce(torch.rand(1013), group=group)
    for group in groups[:2]:
        dist.destroy_process_group(group)
    held = [np.full(size, np.nan, np.float32) for size in (1, 3, 1013, 65_537, 1_048_577)]
    tensors = [torch.full((size,), torch.nan) for size in (7, 511, 99_991)]
    del held[::2], tensors[1]
    gc.collect()
    products.scratch("float32 part", (3, 5), np.float32)
    for buffer in products._local.buffers.values():
        buffer.view(np.uint8)[...] = 0xA5


@pytest.mark.parametrize("name", (*kernels.HOSTS, "generic:cpu"))
def test_the_process_s_past_changes_no_bit(name: str, groups: list[Any], one_thread: None) -> None:
    """Results depended on what had been allocated before, and differed between identical hosts."""
    before = whole_step.digests(whole_step.record(name))
    history(groups)
    assert whole_step.digests(whole_step.record(name)) == before


@pytest.mark.parametrize("name", (*kernels.HOSTS, "generic:cpu"))
def test_nothing_is_read_before_it_is_written(name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cause, made certain: every array that is taken uninitialised is full of garbage."""
    before = whole_step.digests(whole_step.record(name))
    empty, empty_like, taken = np.empty, np.empty_like, []

    def spoiled(array: np.ndarray) -> np.ndarray:
        taken.append(array.nbytes)
        array.reshape(-1).view(np.uint8)[...] = 0xA5
        return array

    monkeypatch.setattr(np, "empty", lambda *args, **options: spoiled(empty(*args, **options)))
    monkeypatch.setattr(np, "empty_like", lambda *args, **options: spoiled(empty_like(*args, **options)))
    monkeypatch.setattr(products._local, "buffers", {}, raising=False)
    assert whole_step.digests(whole_step.record(name)) == before
    assert taken or name != "cpu"
