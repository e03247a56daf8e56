"""Openings and audits of parts of a step, of a real model: what each finds, and what it leaves to the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage import checkpoint, engine
from storage.advance import advance
from storage.audit.certificate import Beacon, verify
from storage.audit.fingerprints import PRIME, chosen_tensor, fingerprints
from storage.audit.keys import Key, load_or_create_key
from storage.audit.open import open_step
from storage.audit.opening import load_opening, opening_key
from storage.audit.pieces import audit_piece
from storage.audit.replay import audit_step
from storage.audit.verdict import AuditProgress
from storage.errors import Refused
from storage.publish import publish
from storage.run import Run
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.opened import BEACON, MATCHES, PIECES, STEP, UNITS, drawn, outcomes, verdicts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Eight steps of a real model, two units each, with checkpoints 0, 5 and 8; published."""
    made = Small(tmp_path_factory.mktemp("pieces"))
    small.begin(made.folder, made.store, made.mix)
    made.train(8)
    publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.fixture(scope="module", autouse=True)
def _self_test_once() -> Iterator[None]:
    """The vectors take longer than all of these audits; test_audit_machine.py is about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "self_test", lambda backend, report: None)
        yield


@pytest.fixture(scope="module")
def opened(trained: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The same, step 6 opened for the draw of one date."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    shutil.copytree(trained.folder, folder)
    made = Small(folder)
    open_step(made.published, STEP, drawn(made), "cpu")
    return made


@pytest.fixture
def made(opened: Small, tmp_path: Path) -> Small:
    """A copy of it that a test may damage."""
    shutil.copytree(opened.folder, tmp_path / "made")
    return Small(tmp_path / "made")


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


def test_every_piece_of_an_honest_step_matches(made: Small, auditor: Key) -> None:
    for folder in ("run", "mix", "sources"):  # from what was published alone
        (made.folder / folder).rename(made.folder / f"hidden-{folder}")
    found = verdicts(made, auditor)
    assert outcomes(found) == MATCHES, [verdict.detail for verdict in found.values()]
    ledger = made.release().ledger
    for piece, verdict in found.items():
        assert verdict.certificate and verdict.exit_code == 0
        body = verify(verdict.certificate, ledger, piece).body
        assert (body.verdict, body.step, body.draw, body.beacon) == ("match", STEP, drawn(made).reference(), BEACON)
        assert body.recorded == body.reproduced


def test_an_opening_holds_what_it_says(opened: Small) -> None:
    run = opened.release()
    found = load_opening(run, STEP)
    assert checkpoint.steps(opened.published, checkpoint.OPENED) == [6, 7]
    assert found.fingerprints.shape == (UNITS, len(run.spec.model.shapes()))
    gradient, _ = replayed(run)
    sums = [sum(column) % PRIME for column in found.fingerprints.T.tolist()]
    assert sums == fingerprints(gradient, BEACON.value, STEP)
    assert found.opening.tensor == chosen_tensor(list(gradient), BEACON.value, STEP)


def replayed(run: Run, step: int = STEP) -> tuple[dict[str, np.ndarray], engine.State]:
    """(the summed gradient of the step, the state after it)."""
    gradient: dict[str, np.ndarray] = {}
    state = checkpoint.load(run.store, run.ledger, 5)
    while state.step <= step:
        advance(run, engine.load_backend("cpu"), state, take=gradient.update)
    return gradient, state


@pytest.mark.parametrize("backend", ["cpu", "generic:cpu", "reference"])
def test_an_opening_is_the_same_whoever_makes_it(trained: Small, opened: Small, tmp_path: Path, backend: str) -> None:
    shutil.copytree(trained.folder, tmp_path / "again")
    again = Small(tmp_path / "again")
    open_step(again.published, STEP, drawn(again), backend)
    assert added(again, trained) == added(opened, trained)
    assert len(added(again, trained)) >= 3


def added(made: Small, before: Small) -> dict[str, bytes]:
    """What the opening wrote into the published store."""
    return {key: made.published.read(key) for key in made.published.list() if key not in before.published.list()}


def test_an_audit_of_the_step_begins_at_the_opening(opened: Small, trained: Small, auditor: Key) -> None:
    assert audit_step(trained.published, STEP, "cpu", auditor).compared == (5, 6)
    assert audit_step(opened.published, STEP, "cpu", auditor).compared == (6,)
    assert audit_step(opened.published, 7, "cpu", auditor).compared == (7,)


def test_opening_again_changes_nothing(made: Small) -> None:
    before = {key: made.published.read(key) for key in made.published.list()}
    reports: list[AuditProgress] = []
    open_step(made.published, STEP, drawn(made), "cpu", reports.append)
    assert {key: made.published.read(key) for key in made.published.list()} == before
    assert not [report for report in reports if report.stage in ("replay", "unit")]


def test_an_interrupted_opening_goes_on_from_the_state(made: Small) -> None:
    """Without its manifest an opening is not there; the state before the step is, so nothing is replayed to it."""
    before = {key: made.published.read(key) for key in made.published.list()}
    for key in (opening_key(STEP), checkpoint.checkpoint_key(7, checkpoint.OPENED)):
        made.published.delete(key)
    reports: list[AuditProgress] = []
    open_step(made.published, STEP, drawn(made), "cpu", reports.append)
    assert {key: made.published.read(key) for key in made.published.list()} == before
    assert [report.step for report in reports if report.stage == "replay"] == [STEP]


def test_not_opened_and_not_drawn_are_refused(trained: Small, made: Small, auditor: Key) -> None:
    verdict = audit_piece(trained.published, PIECES[0], drawn(made), "cpu", auditor)
    assert verdict.exit_code == 13 and "was not opened" in verdict.detail and "verbatim open" in verdict.detail
    draw = drawn(made)
    with pytest.raises(Refused, match="did not choose step 6"):
        open_step(trained.published, STEP, draw.model_copy(update={"steps": [1, 2]}), "cpu")
    with pytest.raises(Refused, match="records steps 0 to 7"):
        open_step(trained.published, 8, draw, "cpu")


def test_another_draw_than_it_was_opened_for_is_refused(made: Small, auditor: Key) -> None:
    """Else whoever opens could choose the coefficients, and with them what they do not see."""
    other = drawn(made, "2026-11-30", Beacon(scheme="file", round=2, value="1" * 64))
    verdict = audit_piece(made.published, PIECES[2], other, "cpu", auditor)
    assert verdict.exit_code == 13 and "opened for the draw of 2026-11-29" in verdict.detail


@pytest.mark.parametrize("unit", [2, 17, 4096])
def test_a_unit_that_is_not_there_is_refused(opened: Small, auditor: Key, unit: int) -> None:
    verdict = audit_piece(opened.published, f"step {STEP} unit {unit}", drawn(opened), "cpu", auditor)
    assert verdict.exit_code == 13 and "its 2 units are 0 to 1" in verdict.detail
