"""What every attack needs: a small real model, an honest run of it, and trainers that cheat in one step.

A cheat changes the step function while the dishonest trainer does step AT; everything else is what runs in earnest, and
so the ledger, its chain, its signatures and its checkpoints are all as well made as an honest run's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import model.step
import storage.audit.open as open_
from model import schedule
from storage import engine
from storage.audit.verdict import Verdict
from storage.errors import VerbatimError
from storage.publish import publish
from tests.storage import small
from tests.storage.conftest import Small

STEPS, AT = 8, 6  # checkpoints 0, 5 and 8
Cheat = Callable[[], AbstractContextManager[Any]]


def begin(folder: Path, **changes: Any) -> Small:
    """A run before its first step."""
    made = Small(folder)
    small.begin(made.folder, made.store, made.mix, **changes)
    return made


def trained(begun: Small, folder: Path, cheat: Cheat | None = None, every: int = 5) -> Small:
    """The run trained and published in another folder, with a cheat in step AT."""
    shutil.copytree(begun.folder, folder)
    made = Small(folder)
    with in_step(AT, cheat) if cheat else nullcontext():
        made.train(STEPS, every)
    publish(made.store, made.mix, made.published, made.key)
    return made


@contextmanager
def in_step(number: int, cheat: Cheat) -> Iterator[None]:
    """The cheat, while step `number` is done."""
    honest = engine.step

    def step(spec: Any, backend: Any, state: Any, windows: Any, **options: Any) -> Any:
        with cheat() if state.step == number else nullcontext():
            return honest(spec, backend, state, windows, **options)

    with mock.patch.object(engine, "step", step):
        yield


@contextmanager
def opening(cheat: Cheat) -> Iterator[None]:
    """Whoever opens step AT does as its trainer did, and does not mind what does not add up."""
    honest = engine.each_unit

    def each_unit(*arguments: Any) -> Iterator[Any]:
        with cheat():
            yield from honest(*arguments)

    with (
        in_step(AT, cheat),
        mock.patch.object(engine, "each_unit", each_unit),
        mock.patch.object(open_, "_check_sums", lambda *arguments: None),
    ):
        yield


def said(found: Verdict | VerbatimError) -> str:
    """What the list of attacks calls a verdict, or an error."""
    label = found.outcome.label if isinstance(found, Verdict) else type(found).__name__
    return f"{label} ({found.exit_code})"


def quick(cases: Iterable[str], *names: str) -> list[Any]:
    """The cases of a test, of which `make test` runs those of these names alone; `make attacks` runs all."""
    return [case if case in names else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def swapped_window(unit: int) -> Cheat:
    """Other data in one unit: the words of a window backwards."""

    def checked(spec: Any, count: int, windows: np.ndarray) -> np.ndarray:
        changed = windows.astype(np.int64)
        changed[unit] = changed[unit, ::-1]
        return changed

    return lambda: mock.patch.object(model.step, "_checked", checked)


def added_to_a_gradient(name: str) -> Cheat:
    """A small integer added to one weight's summed gradient."""
    honest = model.step.gradients

    def gradients(*arguments: Any, **options: Any) -> Any:
        summed = honest(*arguments, **options)
        summed.sums[name].reshape(-1)[0] += 3
        return summed

    return lambda: mock.patch.object(model.step, "gradients", gradients)


def no_update() -> AbstractContextManager[Any]:
    """The optimizer's update left out."""
    return mock.patch.object(model.step, "_update", lambda *arguments: None)


def rate_off_by_one() -> AbstractContextManager[Any]:
    """A learning rate one unit in the last place higher than the recorded one."""
    honest = model.step._update

    def update(spec: Any, backend: Any, state: Any, sums: Any, lr: np.float32, *others: Any) -> None:
        honest(spec, backend, state, sums, np.nextafter(lr, np.float32(1)), *others)

    return mock.patch.object(model.step, "_update", update)


def recorded_rate_off_by_one() -> AbstractContextManager[Any]:
    """The same, and recorded as it was used."""
    honest = schedule.learning_rate
    return mock.patch.object(
        schedule, "learning_rate", lambda spec, tokens: np.nextafter(honest(spec, tokens), np.float32(1))
    )


def spliced(weights: dict[str, np.ndarray]) -> Cheat:
    """The weights after the step taken from a twin of the run."""
    honest = model.step._update

    def update(spec: Any, backend: Any, state: Any, *others: Any) -> None:
        honest(spec, backend, state, *others)
        for name, array in state.weights.items():
            array[...] = weights[name]

    return lambda: mock.patch.object(model.step, "_update", update)
