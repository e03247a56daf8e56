"""Ledgers that are no chain, or one of two; releases without a target; a machine that fails its vectors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kernels
from kernels import conformance
from storage import checkpoint, engine
from storage.audit.certificate import verify
from storage.audit.keys import Key
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.errors import CertificateFault, Divergence, InputFault
from storage.ledger import part_key
from storage.release import RELEASE_KEY
from storage.store import LocalStore
from tests.attacks import scene
from tests.attacks.scene import AT
from tests.storage.conftest import Small
from tests.storage.test_audit import republished


@pytest.fixture
def copy(honest: Small, tmp_path: Path) -> Small:
    """The honest run, to be damaged."""
    shutil.copytree(honest.folder, tmp_path / "copy")
    return Small(tmp_path / "copy")


def duplicated(store: LocalStore) -> None:
    path = store.path(part_key(AT))
    path.write_bytes(path.read_bytes() * 2)


def repeated(store: LocalStore) -> None:
    """The last part once more under the next step's name."""
    store.path(part_key(scene.STEPS)).write_bytes(store.read(part_key(scene.STEPS - 1)))


def reordered(store: LocalStore) -> None:
    first, second = (store.path(part_key(step)) for step in (AT - 1, AT))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def cut_off(store: LocalStore) -> None:
    store.path(part_key(scene.STEPS - 1)).unlink()


def gap(store: LocalStore) -> None:
    store.path(part_key(2)).unlink()


def half_an_entry(store: LocalStore) -> None:
    path = store.path(part_key(scene.STEPS - 1))
    path.write_bytes(path.read_bytes()[:-100])


def edited(store: LocalStore) -> None:
    """Another loss of the same length."""
    path = store.path(part_key(AT))
    data = path.read_bytes()
    at = data.index(b'"loss":"') + 8
    path.write_bytes(data[:at] + b"40400000" + data[at + 8 :])


LEDGERS: dict[str, tuple[Callable[[LocalStore], None], str, str]] = {
    "an entry twice in a part": (duplicated, "LedgerFault", "step 6 where step 7 belongs: step 6 is there twice"),
    "an entry twice": (repeated, "LedgerFault", "step 7 where step 8 belongs: entries were reordered, or the part was"),
    "two entries exchanged": (reordered, "LedgerFault", "step 6 where step 5 belongs: entries were reordered"),
    "the last entry cut off": (cut_off, "InputFault", "its number of steps is 8, the ledger's is 7"),
    "an entry left out": (gap, "LedgerFault", "where step 2 belongs: entry 2 is missing"),
    "half of the last entry": (half_an_entry, "LedgerFault", "is cut off in the middle of an entry"),
    "an edited float": (edited, "LedgerFault", "entry 6 was changed after entry 7 was written"),
}  # fmt: skip


def test_the_unattacked_twin_is_whole(honest: Small, auditor: Key, ends: Callable[[str], None]) -> None:
    assert check_release(honest.published).body.steps == scene.STEPS
    ends(scene.said(audit_step(honest.published, AT, "cpu", auditor)))


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_is_no_chain(copy: Small, auditor: Key, name: str, ends: Callable[[str], None]) -> None:
    damage, fault, said = LEDGERS[name]
    assert audit_step(copy.published, 2, "cpu", auditor).outcome is Outcome.MATCH
    damage(copy.published)
    verdict = audit_step(copy.published, 2, "cpu", auditor)
    assert (verdict.exit_code, verdict.fault, verdict.certificate) == (11, fault, None), verdict.detail
    assert said in verdict.detail
    with pytest.raises(InputFault):
        check_release(copy.published)
    ends(scene.said(verdict))


def test_an_edited_float_that_was_linked_and_signed_anew(
    copy: Small, auditor: Key, ends: Callable[[str], None]
) -> None:
    """Nothing but the replay of that step finds it."""
    store = republished(copy, {"loss": "40400000"}, at=AT)
    check_release(store)
    assert audit_step(store, 2, "cpu", auditor).outcome is Outcome.MATCH
    verdict = audit_step(store, AT, "cpu", auditor)
    assert (verdict.exit_code, verdict.differs_at, verdict.fields) == (10, AT, ("loss",))
    ends(scene.said(verdict))


def test_two_ledgers_for_one_run(
    begun: Small, honest: Small, auditor: Key, tmp_path: Path, ends: Callable[[str], None]
) -> None:
    """A certificate of one is no certificate of the other, and no store takes both."""
    other = scene.trained(begun, tmp_path / "run", scene.no_update)
    ledgers = honest.release().ledger, other.release().ledger
    assert ledgers[0].run_id == ledgers[1].run_id and ledgers[0].head != ledgers[1].head
    certificate = audit_step(honest.published, AT, "cpu", auditor).certificate
    assert certificate and verify(certificate, ledgers[0])
    with pytest.raises(CertificateFault, match="its recorded entry is") as refused:
        verify(certificate, ledgers[1])
    ends(scene.said(refused.value))
    with pytest.raises(Divergence, match="step 6 came out differently") as caught:
        ledgers[0].record(ledgers[1][AT])
    assert caught.value.fields == ("state",)


def test_corruption_of_the_same_size(copy: Small, auditor: Key, ends: Callable[[str], None]) -> None:
    """Half of the bytes of a checkpoint's tensors, of its leaves, of a shard's windows: each named for what it is."""
    store, ledger = copy.published, copy.release().ledger
    manifest = checkpoint.load_manifest(store, ledger, 5)
    places = {f"objects/{manifest.parts[0].digest}": "CheckpointFault", f"objects/{manifest.leaves}": "CheckpointFault"}
    places |= {key: "WindowFault" for key in store.list("mix/windows/") if key.endswith(".arrow") and "/train/" in key}
    found, ended = set(), set()
    for key, fault in places.items():
        path = store.path(key)
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] + bytes(byte ^ 1 for byte in good[len(good) // 2 :]))
        verdicts = [audit_step(store, step, "cpu", auditor) for step in (5, AT, 7)]
        path.write_bytes(good)
        assert all(v.outcome is Outcome.MATCH or (v.exit_code, v.fault) == (11, fault) for v in verdicts)
        found |= {verdict.fault for verdict in verdicts}
        ended |= {scene.said(verdict) for verdict in verdicts if verdict.outcome is not Outcome.MATCH}
    assert found == {"", "CheckpointFault", "WindowFault"}  # a shard that a step does not read is nothing to it
    assert audit_step(store, AT, "cpu", auditor).outcome is Outcome.MATCH
    ends(", ".join(ended))


def test_an_audit_without_a_target(copy: Small, auditor: Key, tmp_path: Path, ends: Callable[[str], None]) -> None:
    for step in (-1, scene.STEPS):
        assert audit_step(copy.published, step, "cpu", auditor).outcome is Outcome.REFUSED
    assert audit_step(LocalStore(tmp_path / "nowhere"), AT, "cpu", auditor).outcome is Outcome.REFUSED
    copy.published.path(RELEASE_KEY).unlink()
    verdict = audit_step(copy.published, AT, "cpu", auditor)
    assert (verdict.outcome, verdict.exit_code, verdict.certificate) == (Outcome.REFUSED, 13, None)
    ends(scene.said(verdict))


def test_a_backend_that_fails_its_vectors(honest: Small, auditor: Key, ends: Callable[[str], None]) -> None:
    """The vectors in earnest: a projection that is wrong in one bit says nothing about the run."""
    backend = kernels.backend("cpu")
    right = backend.project

    def project(*arguments: Any) -> Any:
        result = right(*arguments)
        result.reshape(-1)[-1] ^= 1
        return result

    with (
        mock.patch.object(engine, "_self_test", conformance.self_test),
        mock.patch.object(backend, "project", project),
    ):
        verdict = audit_step(honest.published, AT, "cpu", auditor)
    assert (verdict.outcome, verdict.exit_code, verdict.certificate) == (Outcome.MACHINE_FAULT, 12, None)
    assert "backend cpu fails " in verdict.detail and "linear 128.96.80 plain 1" in verdict.detail
    ends(scene.said(verdict))
