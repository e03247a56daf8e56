"""Saving beside training: steps go on meanwhile, one save is in flight, and its errors and a death lose nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kernels import generic
from model.copying import Copier
from model.memory import KEEP_ALL
from model.state import State, root
from storage import checkpoint, training
from storage.errors import Divergence, Halted, StorageError
from storage.saving import Saver
from storage.training import StepProgress, stop_on_signal, train_segment
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.test_training import ends

PATIENCE = 20  # seconds until a test that waits has failed
WRITE = checkpoint.save


def train(made: Small, report: Callable[[StepProgress], None], **options: Any) -> None:
    train_segment(made.run(), "cpu", checkpoint_every=5, diagnostics_every=4, report=report, **options)


def held(monkeypatch: pytest.MonkeyPatch, step: int) -> threading.Event:
    """Checkpoint `step` is not written until the event is set."""
    event = threading.Event()

    def save(store: Any, ledger: Any, state: State) -> object:
        if state.step == step:
            assert event.wait(PATIENCE)
        return WRITE(store, ledger, state)

    monkeypatch.setattr(checkpoint, "save", save)
    return event


def test_steps_go_on_while_a_checkpoint_is_written(begun: Small, made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    event, seen = held(monkeypatch, 5), []

    def report(progress: StepProgress) -> None:
        if progress.step == 8:
            seen.append(checkpoint.steps(begun.store))
            event.set()

    train(begun, report)
    assert seen == [[0]] and checkpoint.steps(begun.store) == [0, 5, 10, 12]
    for step in (0, 5, 10, 12):
        key = checkpoint.checkpoint_key(step)
        assert begun.store.read(key) == made.store.read(key)
        checkpoint.check(begun.store, begun.run().ledger, step)


def test_one_save_is_in_flight(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, steps = threading.Lock(), []

    def save(store: Any, ledger: Any, state: State) -> object:
        assert lock.acquire(blocking=False), "two saves at once"
        with_it = WRITE(store, ledger, state)
        steps.append(state.step)
        lock.release()
        return with_it

    monkeypatch.setattr(checkpoint, "save", save)
    assert begun.train(every=1).outcome == "finished" and steps == list(range(13))


def test_a_save_waits_for_the_one_before() -> None:
    going, seen = threading.Event(), []

    def write(copy: State) -> None:
        assert going.wait(PATIENCE)
        seen.append((copy.step, float(copy.weights["head"][0, 0])))

    saver, state = Saver(write, beside=True), state_of(np.array)
    saver.save(state)
    state.step, state.weights["head"][0, 0] = 4, 4
    threading.Timer(0.2, going.set).start()
    with saver:
        saver.save(state)  # into the room of the first, which must have been written by then
    assert seen == [(3, 0.0), (4, 4.0)]


@pytest.mark.parametrize("place", [np.array, lambda x: torch.from_numpy(x.copy())], ids=["array", "tensor"])
def test_what_is_saved_is_the_state_of_the_call(place: Callable[[np.ndarray], Any]) -> None:
    """A save that returned before it held a copy wrote what the next step had made of the weights."""
    state = state_of(place)
    expected, going, written = root(state.placed(generic.to_host)), threading.Event(), []

    def write(copy: State) -> None:
        assert going.wait(PATIENCE)
        written.append(root(copy))

    saver = Saver(write, beside=True)
    for _ in range(2):  # into room that is fresh, and into that of the copy before
        saver.save(state)
        saved = state.placed(lambda x: x + 0)
        for tensor in state.tensors().values():
            tensor += 1
        state.step += 1
        going.set()
        saver.wait()
        assert written.pop() == expected
        state, going = replace(saved, step=saved.step), threading.Event()


def state_of(place: Callable[[np.ndarray], Any]) -> State:
    groups = [{"head": np.full((300, 64), k, np.float32), "norm": np.arange(64, dtype=np.float32)} for k in range(3)]
    return State(*groups, step=3, tokens=7).placed(place)


def test_a_copy_is_of_all_that_a_state_has() -> None:
    state, copier = state_of(np.array), Copier()
    copy = copier.copy(state)
    assert root(copy) == root(state) and copy.spike == state.spike
    assert not any(np.shares_memory(a, b) for a, b in zip(copy.tensors().values(), state.tensors().values()))
    before = [tensor.ctypes.data for tensor in copy.tensors().values()]
    assert [tensor.ctypes.data for tensor in copier.copy(state).tensors().values()] == before


@pytest.mark.parametrize(("error", "outcome"), [(StorageError, "failed"), (Divergence, "diverged")])
def test_an_error_ends_the_segment_at_the_next_step(
    begun: Small, made: Small, monkeypatch: pytest.MonkeyPatch, error: type[Exception], outcome: str
) -> None:
    going = threading.Event()

    def save(store: Any, ledger: Any, state: State) -> object:
        if state.step != 5:
            return WRITE(store, ledger, state)
        assert going.wait(PATIENCE)
        raise error("the disk is full of rumours")

    def report(progress: StepProgress) -> None:
        if progress.step == 5:
            going.set()
            for thread in threading.enumerate():
                if thread.name == "save":
                    thread.join(PATIENCE)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(error, match="full of rumours"):
        train(begun, report)
    (end,) = ends(begun)
    assert (end.last_step, end.outcome) == (6, outcome) and "full of rumours" in end.reason
    monkeypatch.setattr(checkpoint, "save", WRITE)
    result = begun.train()
    assert result.validated == (0, 1, 2, 3, 4, 5) and result.head == made.run().ledger.head


def test_an_error_of_the_last_save_is_the_segment_s(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(store: Any, ledger: Any, state: State) -> object:
        if state.step == small.STEPS:
            raise StorageError("no room for the last")
        return WRITE(store, ledger, state)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(StorageError, match="no room for the last"):
        begun.train()
    assert ends(begun)[0].outcome == "failed" and len(begun.run().ledger) == small.STEPS


def test_memory_damaged_in_the_copy_is_not_saved(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copier.copy

    def damaged(copier: Copier, state: State) -> State:
        found = copy(copier, state)
        if state.step == 5:
            found.weights["head"].view(np.uint32)[299, 63] ^= 1
        return found

    monkeypatch.setattr(Copier, "copy", damaged)
    with pytest.raises(Divergence, match=r"state 5 in memory has root .* no checkpoint was written"):
        begun.train()
    assert checkpoint.steps(begun.store) == [0]


def test_every_error_waits_for_the_save_in_flight(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    event = held(monkeypatch, 5)

    def report(progress: StepProgress) -> None:
        if progress.step == 6:
            threading.Timer(0.3, event.set).start()

    with small.stand_in(norms={2: "7", 4: "7", 6: "7"}), pytest.raises(Halted):
        train(begun, report)
    assert checkpoint.steps(begun.store) == [0, 5]


def test_sigterm_waits_for_the_save_in_flight(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    event = held(monkeypatch, 5)

    def report(progress: StepProgress) -> None:
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.3, event.set).start()

    with stop_on_signal() as should_stop:
        train(begun, report, should_stop=should_stop)
    assert checkpoint.steps(begun.store) == [0, 5, 7] and ends(begun)[0].outcome == "stopped"


def test_killed_while_a_checkpoint_is_written(begun: Small, made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        held(monkeypatch, 5)
        train(begun, _die_at_eight)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.steps(begun.store) == [0] and len(begun.run().ledger) == 9
    result = begun.train()
    assert result.validated == tuple(range(9)) and result.head == made.run().ledger.head
    assert checkpoint.steps(begun.store) == [0, 5, 10, 12]


def _die_at_eight(progress: StepProgress) -> None:
    if progress.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)


def test_in_place_where_memory_does_not_hold_a_copy(begun: Small, made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def save(store: Any, ledger: Any, state: State) -> object:
        threads.append(threading.current_thread())
        return WRITE(store, ledger, state)

    monkeypatch.setattr(checkpoint, "save", save)
    for lean in (False, True):
        plan = replace(KEEP_ALL, copy_state=not lean)
        with mock.patch.object(training, "plan_for", return_value=plan):
            begun.train(until=12 if lean else 6)
        assert all((thread is threading.main_thread()) == lean for thread in threads)
        threads.clear()
    assert begun.run().ledger.head == made.run().ledger.head
