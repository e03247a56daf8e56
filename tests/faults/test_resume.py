"""Resuming elsewhere lost its place in the data, drew other numbers, or gave ranks other orders: here it cannot."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kernels import canonical
from model.ranks import Ranks
from model.spec import Phase, ScheduleSpec
from model.state import SCALARS, State
from storage import checkpoint, engine
from storage.errors import CheckpointFault, Divergence
from storage.store import MemoryStore
from tests.storage import small
from tests.storage.conftest import Small

WINDOWS, STEPS = 8, 40  # of a step; the first pass over the sources ends on the way, and so does the second of one


@pytest.fixture
def stand_in() -> Iterator[None]:
    with small.stand_in():
        yield


def begin(folder: Path) -> Small:
    """A run over more windows than there are."""
    schedule = ScheduleSpec(
        peak_lr="0.003",
        warmup_tokens=64,
        total_tokens=small.SEQ_LEN * WINDOWS * STEPS,
        phases=(Phase(from_tokens=0, windows=WINDOWS),),
    )
    made = Small(folder)
    small.begin(folder, made.store, made.mix, schedule=schedule)
    return made


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The run, trained without a stop."""
    with small.stand_in():
        made = begin(tmp_path_factory.mktemp("long"))
        made.train(every=10)
    return made


def windows_seen(made: Small) -> list[tuple[int, int, int]]:
    """(source, pass, position) of every window that the ledger's entries say was trained on, in order."""
    stream, found = made.run().stream, []
    for entry in made.run().ledger:
        where = stream.locate(entry.first_window, entry.windows)
        assert entry.batch == stream.batch_digest(entry.first_window, entry.windows)
        found += list(zip(where.source.tolist(), where.passes.tolist(), where.position.tolist(), strict=True))
    return found


def test_the_run_goes_through_several_passes(long: Small) -> None:
    """What the tests below rely on: a step within a later pass, and one where a pass begins."""
    passes = [passed for _, passed, _ in windows_seen(long)]
    assert passes[0] == 0 and max(passes) >= 2 and len(long.run().ledger) == STEPS


@pytest.mark.parametrize("stop", [3, 17, 29, 38])
def test_a_fresh_process_goes_on_in_the_same_pass_and_order(
    long: Small, tmp_path: Path, stand_in: None, stop: int
) -> None:
    """Resuming replayed the first epoch's permutation, or another order, or wanted an edited configuration."""
    made = begin(tmp_path)
    fork = multiprocessing.get_context("fork")
    for until in (stop, None):  # each segment in a process that knows nothing of the other; the same recipe
        process = fork.Process(target=made.train, args=(until, 7))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert [e.batch for e in made.run().ledger] == [e.batch for e in long.run().ledger]
    assert windows_seen(made) == windows_seen(long)


def test_no_window_is_seen_twice_before_all_were_seen(long: Small) -> None:
    """After a reboot the loader began at the first shard again: 40 % of a run went over what it had seen."""
    seen, stream = windows_seen(long), long.run().stream
    for source, count in enumerate(stream.mixture.windows):
        passes = [passed for s, passed, _ in seen if s == source]
        assert passes == sorted(passes)
        for number in range(max(passes)):
            positions = [position for s, passed, position in seen if (s, passed) == (source, number)]
            assert sorted(positions) == list(range(count)), (source, number)
    shards = [position // 16 for source, passed, position in seen if (source, passed) == (0, 0)]
    assert max(shards) >= 3 and shards == sorted(shards)  # shards one after another, each once


@pytest.mark.parametrize("field", sorted(SCALARS))
def test_a_state_without_its_place_cannot_be_saved_or_taken(long: Small, tmp_path: Path, field: str) -> None:
    """The data loader was simply not given to save(): every field is mandatory, and under the root."""
    ledger, store = long.run().ledger, MemoryStore(str(tmp_path))
    state = checkpoint.load(long.store, ledger, 10)
    scalars = {name: value for name, value in state.scalars().items() if name != field}
    with pytest.raises(ValueError, match="state has scalars"):
        State.of(state.tensors(), scalars)
    with mock.patch.object(State, "scalars", lambda self: scalars), pytest.raises(Divergence, match="no checkpoint"):
        checkpoint.save(store, ledger, state)
    assert not checkpoint.steps(store)
    checkpoint.save(store, ledger, state)
    assert checkpoint.steps(store) == [10]


@pytest.mark.parametrize("lost", ["m/head", "spike", "leaves"])
def test_what_cannot_be_restored_stops_the_run(long: Small, tmp_path: Path, stand_in: None, lost: str) -> None:
    """A loader refused the generator's state, the exception was swallowed, and training went on with another."""
    shutil.copytree(long.folder, tmp_path / "made")
    made = Small(tmp_path / "made")
    path = made.store.path(checkpoint.checkpoint_key(STEPS))
    document = canonical.loads(path.read_bytes())
    if lost == "leaves":
        made.store.delete(checkpoint.object_key(document["leaves"]))
    else:
        del document["scalars" if lost == "spike" else "tensors"][lost]
        path.write_bytes(canonical.dumps(document))
    before = made.store.list("segments/")
    with pytest.raises(CheckpointFault):
        made.train()
    assert made.store.list("segments/") == before  # it did not even begin


WORLDS = [(size, batch) for size in range(1, 13) for batch in (None, 1, 2, 5)]


def units_of(rank: int, size: int, batch: int | None, units: int) -> list[int]:
    """The units that a rank of such a world works on, in its order."""
    ranks: Any = object.__new__(Ranks)  # a process group is not needed to ask
    ranks.rank, ranks.size, ranks.batch = rank, size, batch
    return [unit for group in ranks.batches(units) for unit in group]


@pytest.mark.parametrize("units", [1, 7, 12, 64])
def test_every_layout_of_ranks_works_on_each_unit_once(units: int) -> None:
    """The order hung on replicas and workers; ranks shuffled by seeds of their own, with holes and doubles."""
    for size, batch in WORLDS:
        found = [units_of(rank, size, batch, units) for rank in range(size)]
        assert sorted(unit for own in found for unit in own) == list(range(units)), (size, batch)
        turns = [own[turn] for turn in range(units) for own in found if turn < len(own)]
        assert turns == list(range(units)), (size, batch)  # dealt in the stream's order, whatever the world


@pytest.mark.parametrize("readers", [1, 8])
def test_any_number_of_readers_gets_one_stream(long: Small, readers: int) -> None:
    """Another number of workers gave another order; here windows have a number, and who asks is not part of it."""
    stream = long.run().stream
    expected = [stream.windows(8 * step, 8).tobytes() for step in range(STEPS)]
    with ThreadPoolExecutor(readers) as pool:
        asked = list(range(STEPS))
        random.Random(readers).shuffle(asked)
        found = dict(zip(asked, pool.map(lambda step: stream.windows(8 * step, 8).tobytes(), asked), strict=True))
    assert [found[step] for step in range(STEPS)] == expected


def test_every_evaluation_uses_the_same_windows(tmp_path: Path, stand_in: None) -> None:
    """Repeated evaluations silently went on in the held-out set, from where the last one had stopped."""
    seen, real = [], engine.evaluate

    def evaluate(*arguments: Any) -> Any:
        seen.append(arguments[3].tobytes())
        return real(*arguments)

    made = begin(tmp_path)
    sources = len(made.run().stream.manifest.mix.sources)
    with mock.patch.object(engine, "evaluate", evaluate):
        made.train(until=6, every=2)
        made.train(until=8, every=2)
    rounds = [seen[start : start + sources] for start in range(0, len(seen), sources)]
    assert len(rounds) == 5 and all(found == rounds[0] for found in rounds)
    assert b"".join(rounds[0]) == made.run().stream.held_out().tobytes()


SEEDS = (
    "random.seed",
    "numpy.random.seed",
    "torch.manual_seed",
    "torch.random.set_rng_state",
    "numpy.random.set_state",
)


def test_no_generator_of_the_process_is_drawn_from_or_set(tmp_path: Path) -> None:
    """252 of 256 ranks got another rank's generator; elsewhere a late call of seed() undid what was restored. Here
    every draw is a function of seed, purpose and number: there is nothing to restore, and nothing that is consumed."""
    made = Small(tmp_path)
    small.begin(made.folder, made.store, made.mix)
    before = generators()
    with ExitStack() as stack:
        spies = [stack.enter_context(mock.patch(name)) for name in SEEDS]
        made.train(until=2)
        made.train(until=3)
    assert not [spy for spy in spies if spy.called]
    assert generators() == before


def test_generators_of_other_states_change_nothing(tmp_path: Path) -> None:
    """The same, from outside: ranks whose generators stand elsewhere do the same steps."""
    roots = []
    for draws in (0, 5):
        random.seed(draws), np.random.seed(draws), torch.manual_seed(draws)
        made = Small(tmp_path / str(draws))
        small.begin(made.folder, made.store, made.mix)
        made.train(until=2)
        roots.append(made.run().ledger.trajectory_root())
    assert roots[0] == roots[1]


def generators() -> tuple[str, str, bytes]:
    """Where the process's own generators stand."""
    return repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()
