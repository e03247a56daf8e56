"""Copies of one release: what is bad in one is named and taken from another; what is bad in all is one clear fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.audit.keys import Key, load_or_create_key
from storage.audit.release import check_release
from storage.audit.replay import audit_initial, audit_step
from storage.audit.verdict import Outcome, Verdict
from storage.errors import InputFault, MissingObject, StorageError, UsageError
from storage.ledger import HEADER_KEY
from storage.mirrors import Mirrors, bad_copies, open_copies, stores_of
from storage.objects import Keys
from storage.publish import publish
from storage.release import RELEASE_KEY, Release
from storage.store import LocalStore, MemoryStore, object_digest
from tests.storage import small
from tests.storage.conftest import Small, flip

STEP = 8


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def second(made: Small) -> LocalStore:
    """Another copy of the release."""
    store = LocalStore(made.folder / "second")
    publish(made.store, made.mix, store, made.key)
    return store


def audited(*stores: LocalStore, key: Key, step: int = STEP) -> Verdict:
    return audit_step(open_copies([store.uri for store in stores]), step, "cpu", key)


def flipped(store: LocalStore, key: str) -> None:
    flip(store.path(key), store.size(key) // 2)


def cut(store: LocalStore, key: str) -> None:
    path = store.path(key)
    path.write_bytes(path.read_bytes()[: store.size(key) // 2])


def gone(store: LocalStore, key: str) -> None:
    store.path(key).unlink()


def nul(store: LocalStore, key: str) -> None:
    store.path(key).write_bytes(bytes(store.size(key)))


def read_by_an_audit(store: LocalStore) -> list[str]:
    """Every object but those that an audit of STEP does not read."""
    unread = ("digests/", "segments/", "probe/", "diagnostics/", "recipe", "mix/docs", "mix/tok", "mix/made")
    return [key for key in store.list() if not key.startswith(unread) and "held_out" not in key]


def test_one_folder_is_read_as_it_is(made: Small) -> None:
    store = open_copies([made.published.uri, str(made.published.root)])
    assert isinstance(store, LocalStore) and bad_copies(store) == () and stores_of(store) == [store]


def test_sound_copies(made: Small, second: LocalStore, auditor: Key) -> None:
    store = open_copies([made.published.uri, second.uri])
    assert isinstance(store, Mirrors) and [copy.uri for copy in stores_of(store)] == [made.published.uri, second.uri]
    assert store.list() == made.published.list()
    assert all(store.read(key) == made.published.read(key) for key in store.list())
    assert all(store.size(key) == made.published.size(key) for key in store.list())
    assert audit_step(store, STEP, "cpu", auditor).outcome is Outcome.MATCH and bad_copies(store) == ()
    with pytest.raises(UsageError, match="can only be read"):
        store.create("a", b"")
    with pytest.raises(UsageError, match="can only be read"):
        store.delete(HEADER_KEY)
    with pytest.raises(MissingObject, match=r"there is no lease/1\.json"):
        store.read("lease/1.json")


@pytest.mark.parametrize("damage", [flipped, cut, gone, nul])
def test_everything_is_bad_in_one(
    made: Small, second: LocalStore, auditor: Key, damage: Callable[[LocalStore, str], None]
) -> None:
    """Of the first named store nothing can be used; each object that was asked for is reported, once."""
    for key in made.published.list():
        damage(made.published, key)
    verdict = audited(made.published, second, key=auditor)
    assert verdict.outcome is Outcome.MATCH and verdict.certificate, verdict.detail
    assert {copy.store for copy in verdict.bad_copies} == {made.published.uri}
    found = [copy.key for copy in verdict.bad_copies]
    assert len(found) == len(set(found)) and {HEADER_KEY, RELEASE_KEY, "mix/manifest.json"} <= set(found)
    assert {key.split("/")[0] for key in found} == {"ledger", RELEASE_KEY, "mix", "checkpoints", "objects"}
    assert verdict.document()["bad_copies"] == [copy.document() for copy in verdict.bad_copies]
    assert all(copy.wrong for copy in verdict.bad_copies)


def test_every_object_is_bad_in_one_of_two(made: Small, second: LocalStore, auditor: Key) -> None:
    """Also RELEASE.json in one and the header that it is signed under in the other."""
    damaged = []
    for number, key in enumerate(made.published.list()):
        store = (made.published, second)[{RELEASE_KEY: 0, HEADER_KEY: 1}.get(key, number % 2)]
        flipped(store, key)
        damaged.append((store.uri, key))
    for step in (0, STEP, 11):
        verdict = audited(made.published, second, key=auditor, step=step)
        assert verdict.outcome is Outcome.MATCH, verdict.detail
        assert {(copy.store, copy.key) for copy in verdict.bad_copies} <= set(damaged)
        assert len(verdict.bad_copies) > 5
    assert check_release(open_copies([made.published.uri, second.uri])).body.steps == 12


@pytest.mark.parametrize("number", range(4))
def test_one_object_is_bad_in_all(made: Small, second: LocalStore, auditor: Key, number: int) -> None:
    """One input fault that names each store; and the same object sound anywhere is enough."""
    third = LocalStore(made.folder / "third")
    publish(made.store, made.mix, third, made.key)
    keys = read_by_an_audit(second)
    key = [HEADER_KEY, RELEASE_KEY, "mix/manifest.json", next(k for k in keys if k.startswith("ledger/0"))][number]
    cut(made.published, key)
    cut(second, key)
    verdict = audited(made.published, second, key=auditor)
    assert (verdict.outcome, verdict.certificate) == (Outcome.INPUT_FAULT, None), verdict.detail
    assert key in verdict.detail and "sound in none of 2 stores" in verdict.detail
    assert made.published.uri in verdict.detail and second.uri in verdict.detail
    assert {(copy.store, copy.key) for copy in verdict.bad_copies} == {(s.uri, key) for s in (made.published, second)}
    verdict = audited(made.published, second, third, key=auditor)
    assert verdict.outcome is Outcome.MATCH and len(verdict.bad_copies) == 2


def test_a_window_that_is_bad_in_all(made: Small, second: LocalStore, auditor: Key) -> None:
    for store in (made.published, second):
        for key in store.list("mix/windows/"):
            if key.endswith(".arrow"):
                nul(store, key)
    verdict = audited(made.published, second, key=auditor)
    assert (verdict.outcome, verdict.fault) == (Outcome.INPUT_FAULT, "WindowFault"), verdict.detail
    assert verdict.detail.count("has leaf") == 2


def test_a_step_that_does_not_match_is_found_again_from_the_copies(
    made: Small, second: LocalStore, auditor: Key
) -> None:
    flipped(made.published, RELEASE_KEY)
    with small.stand_in(flaw=STEP):
        verdict = audited(made.published, second, key=auditor)
    assert (verdict.outcome, verdict.differs_at, verdict.tensors) == (Outcome.NO_MATCH, STEP, ("weights/head",))
    assert verdict.certificate and [copy.key for copy in verdict.bad_copies] == [RELEASE_KEY]


def other_run(made: Small) -> LocalStore:
    """A release of another run of the same mix."""
    other = Small(made.folder / "other")
    small.begin(other.folder, other.store, other.mix, seed=8)
    other.train()
    publish(other.store, other.mix, other.published, other.key)
    return other.published


@pytest.mark.parametrize("damaged", ["", HEADER_KEY])
def test_copies_of_two_runs_are_refused(made: Small, auditor: Key, damaged: str) -> None:
    """Also where only the RELEASE.json of one still says which run it is."""
    other = other_run(made)
    if damaged:
        nul(other, damaged)
    runs = [made.release().ledger.run_id, _run_of(other)]
    for stores in ((made.published, other), (other, made.published)):
        verdict = audited(*stores, key=auditor)
        assert verdict.outcome is Outcome.REFUSED and all(run in verdict.detail for run in runs), verdict.detail
        assert all(store.uri in verdict.detail for store in stores)


def _run_of(store: LocalStore) -> str:
    return Release.parse(store.read(RELEASE_KEY), RELEASE_KEY).body.run


def test_another_runs_objects_are_never_taken(made: Small, auditor: Key) -> None:
    """A store that passes for a copy by its header and RELEASE.json alone."""
    other = other_run(made)
    for key in (HEADER_KEY, RELEASE_KEY):
        other.path(key).write_bytes(made.published.read(key))
    verdict = audited(other, made.published, key=auditor)
    assert verdict.outcome is Outcome.MATCH, verdict.detail
    assert any(copy.key.startswith("ledger/0") for copy in verdict.bad_copies)


def test_nothing_published_anywhere(made: Small, auditor: Key, tmp_path: Path) -> None:
    nowhere = [LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")]
    verdict = audit_initial(open_copies([store.uri for store in nowhere]), "cpu", auditor)
    assert verdict.outcome is Outcome.REFUSED and "no run is there" in verdict.detail
    verdict = audited(made.store, nowhere[0], key=auditor)
    assert verdict.outcome is Outcome.REFUSED and f"no {RELEASE_KEY}" in verdict.detail
    verdict = audited(nowhere[0], made.published, key=auditor)
    assert verdict.outcome is Outcome.MATCH and {copy.store for copy in verdict.bad_copies} == {nowhere[0].uri}


def test_an_object_beside_the_release_is_found_in_any_copy(made: Small, second: LocalStore) -> None:
    second.create("extra.bin", b"x")
    with pytest.raises(InputFault, match=f"{second.uri} holds extra.bin, which"):
        check_release(open_copies([made.published.uri, second.uri]))


class Dead(MemoryStore):
    """A store that nobody answers for; asked: how often it was tried."""

    asked = 0

    def read(self, key: str, *arguments: object, **named: object) -> bytes:
        self.asked += 1
        raise StorageError(f"{self.uri}: no answer")

    def list(self, prefix: str = "") -> Keys:
        raise StorageError(f"{self.uri}: no answer")

    read_range = read


def test_a_store_that_does_not_answer_is_asked_last_from_then_on(made: Small, auditor: Key) -> None:
    dead = Dead("dead")
    verdict = audit_step(Mirrors([dead, made.published]), STEP, "cpu", auditor)
    assert verdict.outcome is Outcome.MATCH and dead.asked <= 3
    assert {(copy.store, copy.wrong) for copy in verdict.bad_copies} == {(dead.uri, f"{dead.uri}: no answer")}
    assert check_release(Mirrors([dead, made.published])).body.steps == 12
    with pytest.raises(StorageError, match="no answer"):
        audit_step(Mirrors([dead]), STEP, "cpu", auditor)


def test_a_release_that_lists_another_object_than_is_asked_for(made: Small, second: LocalStore) -> None:
    store = open_copies([made.published.uri, second.uri])
    with pytest.raises(InputFault, match=r"RELEASE\.json lists mix/manifest\.json with digest"):
        store.read("mix/manifest.json", object_digest(b"another"))
