"""Opened states that are not what they are said to be: told by name, passed over, and the audit ends in its verdict."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import checkpoint, engine
from storage.advance import advance
from storage.audit.keys import Key, load_or_create_key
from storage.audit.opened import proven_states
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.mirrors import open_copies
from storage.store import LocalStore
from tests.storage.conftest import Small, flip

STEP, STATE = 8, 7  # checkpoints 0, 5, 10 and 12
KEY = checkpoint.checkpoint_key(STATE)


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def opened(made: Small) -> Small:
    """The run with state 7 beside it."""
    run = made.release()
    state = checkpoint.load(run.store, run.ledger, 5)
    while state.step < STATE:
        advance(run, engine.load_backend("cpu"), state)
    checkpoint.save(made.opened, run.ledger, state)
    return made


def _object(of: Callable[[checkpoint.Manifest], str]) -> Callable[[LocalStore, Small], Path]:
    def path(store: LocalStore, made: Small) -> Path:
        return store.path(checkpoint.object_key(of(checkpoint.load_manifest(store, made.run().ledger, STATE))))

    return path


PART, LEAVES = _object(lambda manifest: manifest.parts[0].digest), _object(lambda manifest: manifest.leaves)


def _flipped(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def _another_step(store: LocalStore, made: Small) -> None:
    """Checkpoint 5, whole and sound, under the name of state 7."""
    shutil.copytree(made.published.root / "objects", store.root / "objects", dirs_exist_ok=True)
    store.path(KEY).write_bytes(made.published.read(checkpoint.checkpoint_key(5)))


BOGUS: dict[str, Callable[[LocalStore, Small], object]] = {
    "no JSON": lambda store, made: store.path(KEY).write_bytes(b"\x80\x04garbage"),
    "no manifest": lambda store, made: store.path(KEY).write_bytes(b"{}"),
    "too long": lambda store, made: store.path(KEY).write_bytes(bytes(checkpoint.MAX_MANIFEST + 1)),
    "no part": lambda store, made: PART(store, made).unlink(),
    "no leaves": lambda store, made: LEAVES(store, made).unlink(),
    "no objects": lambda store, made: shutil.rmtree(store.root / "objects"),
    "a byte of a part": lambda store, made: _flipped(PART(store, made)),
    "a byte of the leaves": lambda store, made: _flipped(LEAVES(store, made)),
    "another step's": _another_step,
}


@pytest.mark.parametrize("bogus", BOGUS)
def test_a_bogus_opened_state_is_told_and_passed_over(opened: Small, auditor: Key, bogus: str) -> None:
    assert audit_step(opened.published, STEP, "cpu", auditor).compared == (7, 8)
    second = LocalStore(opened.folder / "second")
    shutil.copytree(opened.published.root, second.root)
    BOGUS[bogus](opened.opened, opened)

    alone = audit_step(opened.published, STEP, "cpu", auditor)
    assert (alone.outcome, alone.compared) == (Outcome.MATCH, (5, 6, 7, 8)), alone.detail
    assert [(copy.store, copy.key) for copy in alone.bad_copies] == [(opened.opened.uri, KEY)]
    assert alone.bad_copies[0].wrong and alone.certificate

    both = audit_step(open_copies([opened.published.uri, second.uri]), STEP, "cpu", auditor)
    assert (both.outcome, both.compared) == (Outcome.MATCH, (7, 8)), both.detail
    assert {copy.store for copy in both.bad_copies} <= {opened.opened.uri}

    shutil.rmtree(second.root / "opened")
    neither = audit_step(open_copies([second.uri, opened.published.uri]), STEP, "cpu", auditor)
    assert (neither.outcome, neither.compared) == (Outcome.MATCH, (5, 6, 7, 8)), neither.detail
    assert (opened.opened.uri, KEY) in {(copy.store, copy.key) for copy in neither.bad_copies}


@pytest.mark.parametrize("bogus", [name for name in BOGUS if name != "a byte of a part"])
def test_a_bogus_state_answers_no_draw(opened: Small, bogus: str) -> None:
    """All but what only reading the whole state shows."""
    ledger, states = opened.release().ledger, [*range(13), 99999999]
    assert [*filter(proven_states(opened.published, ledger), states)] == [0, 5, STATE, 10, 12]
    BOGUS[bogus](opened.opened, opened)
    opened.opened.create("checkpoints/99999999.json", b"{}")
    opened.published.create("checkpoints/00000003.json", b"{}")
    assert [*filter(proven_states(opened.published, ledger), states)] == [0, 5, 10, 12]


def test_a_checkpoint_that_the_release_does_not_list_is_passed_over_too(made: Small, auditor: Key) -> None:
    made.published.create(KEY, b"{}")
    verdict = audit_step(made.published, STEP, "cpu", auditor)
    assert (verdict.outcome, verdict.compared) == (Outcome.MATCH, (5, 6, 7, 8)), verdict.detail
    assert [(copy.store, copy.key) for copy in verdict.bad_copies] == [(made.published.uri, KEY)]


def test_a_checkpoint_of_the_release_is_never_passed_over(opened: Small, auditor: Key) -> None:
    """It is signed: an audit that began elsewhere would hide that."""
    opened.published.path(checkpoint.checkpoint_key(5)).write_bytes(b"{}")
    assert audit_step(opened.published, 6, "cpu", auditor).outcome is Outcome.INPUT_FAULT
