"""A trainer who cheats in step 6 alone, links everything after it honestly, and opens the step as it suits him.

Each cheat is caught by the piece that can see it and by no other; the same run without it is in test_pieces.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage.audit.open as open_
from model import step
from storage import engine
from storage.audit import again, confirm
from storage.audit.certificate import verify
from storage.audit.fingerprints import chosen_tensor
from storage.audit.keys import Key, load_or_create_key
from storage.audit.open import open_step
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.publish import publish
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.opened import BEACON, MATCHES, STEP, drawn, outcomes, verdicts


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test and the repetition in a fresh process have tests of their own, and take longer than all of this."""
    monkeypatch.setattr(engine, "self_test", lambda backend, report: None)
    monkeypatch.setattr(confirm, "repeat", again.found)


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


NAMED = chosen_tensor(list(small.spec().model.shapes()), BEACON.value, STEP)
OTHER = next(name for name in small.spec().model.shapes() if name != NAMED)


class Cheat:
    """What the cheat does differently in the step; each part is an honest function unless it is replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.active = monkeypatch, False
        original = engine.step

        def watched(spec: Any, backend: Any, state: Any, windows: Any, **options: Any) -> Any:
            self.active = state.step == STEP
            try:
                return original(spec, backend, state, windows, **options)
            finally:
                self.active = False

        monkeypatch.setattr(engine, "step", watched)

    def in_step(self, module: Any, name: str, change: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        """Replace a function of the model by change(it, arguments) while step 6 is done."""
        honest = getattr(module, name)

        def replaced(*arguments: Any) -> Any:
            return change(honest, arguments) if self.active else honest(*arguments)

        self.patch.setattr(module, name, replaced)


def swapped(windows: np.ndarray) -> np.ndarray:
    """The step's windows, those of unit 1 replaced: each token by its neighbour."""
    return np.concatenate([windows[:1], np.roll(windows[1:], 1, axis=1)])


def swap_data(cheat: Cheat) -> None:
    def change(honest: Any, arguments: tuple[Any, ...]) -> Any:
        spec, backend, weights, windows, *rest = arguments
        return honest(spec, backend, weights, swapped(windows), *rest)

    cheat.in_step(step, "gradients", change)
    honest_units = engine.each_unit
    cheat.patch.setattr(  # he opens what he did
        engine, "each_unit", lambda spec, backend, weights, windows, memory: honest_units(
            spec, backend, weights, swapped(windows), memory)
    )  # fmt: skip


def add_to_gradient(name: str) -> Callable[[Cheat], None]:
    def cheating(cheat: Cheat) -> None:
        def change(honest: Any, arguments: tuple[Any, ...]) -> Any:
            summed = honest(*arguments)
            summed.sums[name].reshape(-1)[3] += 5
            return summed

        cheat.in_step(step, "gradients", change)
        cheat.patch.setattr(open_, "_check_sums", lambda *arguments: None)  # he doesn't mind

    return cheating


def skip_update(cheat: Cheat) -> None:
    cheat.in_step(step, "_update", lambda honest, arguments: None)


def wrong_rate(cheat: Cheat) -> None:
    """Learning rate off by one ulp in the update, right in the entry."""

    def change(honest: Any, arguments: tuple[Any, ...]) -> Any:
        *before, lr, mean, clip = arguments
        return honest(*before, np.nextafter(lr, np.float32(1)), mean, clip)

    cheat.in_step(step, "_update", change)


def run_of(folder: Path, cheating: Callable[[Cheat], None]) -> Small:
    """A run whose trainer cheats in step 6, and opens it in his way."""
    made = Small(folder)
    with pytest.MonkeyPatch.context() as patch:
        small.begin(made.folder, made.store, made.mix)
        cheating(Cheat(patch))
        made.train(8)
        publish(made.store, made.mix, made.published, made.key)
        open_step(made.published, STEP, drawn(made), "cpu")
    return made


@pytest.mark.parametrize(
    ("cheating", "caught"),
    [
        (swap_data, {"unit 1"}),
        (add_to_gradient(NAMED), {"sum"}),
        (add_to_gradient(OTHER), set()),  # what one parameter of all cannot say; an audit of the step does
        (skip_update, {"update"}),
        (wrong_rate, {"update"}),
    ],
)
def test_each_cheat_is_caught_by_its_piece_and_no_other(
    tmp_path: Path, auditor: Key, cheating: Callable[[Cheat], None], caught: set[str]
) -> None:
    made = run_of(tmp_path / "cheat", cheating)
    found = verdicts(made, auditor)
    expected = {part: "no-match" if part in caught else "match" for part in MATCHES}
    assert outcomes(found) == expected, [verdict.detail for verdict in found.values()]
    whole = audit_step(made.published, STEP, "cpu", auditor)
    assert whole.outcome is Outcome.NO_MATCH
    for part in caught:
        verdict = found[f"step {STEP} {part}"]
        assert verdict.certificate
        body = verify(verdict.certificate, made.release().ledger, verdict.piece).body
        assert body.verdict == "no-match" and body.recorded != body.reproduced
