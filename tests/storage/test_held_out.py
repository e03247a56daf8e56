"""Held-out losses of a published state: measured again, compared with their record, certified like a step."""

import json
from pathlib import Path

import pytest

from storage.audit.certificate import Certificate, sign, verify
from storage.audit.held_out import audit_held_out, check_recorded
from storage.audit.keys import load_or_create_key
from storage.audit.proofs import check_proofs
from storage.audit.verdict import Outcome, Verdict
from storage.errors import CertificateFault
from storage.figures import SourceLoss, load_probe, probe_key
from storage.ledger import Ledger
from storage.store import object_digest
from tasks import evaluation
from tests.storage.conftest import Small, flip
from tests.storage.test_release import signed


def audited(made: Small, step: int = 10, name: str = "auditor") -> Verdict:
    return audit_held_out(made.published, step, "cpu", load_or_create_key(made.folder / "keys", name))


def test_a_match_is_certified_and_bound_to_the_state(made: Small) -> None:
    verdict = audited(made)
    assert verdict.outcome is Outcome.MATCH and verdict.exit_code == 0 and verdict.certificate
    ledger = Ledger(made.published)
    assert "mean loss on each source's held-out windows" in verdict.document()["explanation"]
    body = verify(verdict.certificate, ledger, "held-out 10").body
    probe = load_probe(made.published, ledger, 10)
    assert body.reproduced == probe and body.recorded == object_digest(made.published.read(probe_key(10)))
    assert (probe.state, body.predecessor, body.step) == (ledger[9].state, ledger[9].digest(), None)
    check_recorded(made.published, ledger, body)
    check_proofs(made.published, [body], "cpu")


def rewritten(made: Small, loss: str = "40490fdb") -> None:
    """A trainer's lie: another loss of one source, signed into the release."""
    probe = load_probe(made.published, Ledger(made.published), 10)
    lie = probe.model_copy(update={"sources": probe.sources | {"nouns": SourceLoss(loss=loss, windows=8)}})
    made.published.path(probe_key(10)).write_bytes(lie.canonical())
    signed(made)


def test_another_loss_than_the_state_has_is_no_match(made: Small) -> None:
    rewritten(made)
    verdict = audited(made)
    assert verdict.outcome is Outcome.NO_MATCH and verdict.fields == ("nouns",)
    assert "recorded 3.141593 nats (float32 40490fdb, 8 windows)" in verdict.detail and verdict.certificate
    said = verdict.document()
    assert "losses of this state" in said["explanation"] and said["next"].startswith("verbatim evaluate")
    body = verify(verdict.certificate, Ledger(made.published)).body
    assert body.verdict == "no-match" and isinstance(
        body.reproduced, type(load_probe(made.store, made.run().ledger, 10))
    )
    check_recorded(made.published, Ledger(made.published), body)
    with pytest.raises(CertificateFault, match="compared a record of held-out 10 with digest"):
        check_recorded(made.store, made.run().ledger, body)


def test_what_cannot_be_compared_is_refused(made: Small) -> None:
    for step, message in ((7, "the release holds no probe/00000007.json"), (99, "state 99 is not in the ledger")):
        verdict = audited(made, step)
        assert verdict.outcome is Outcome.REFUSED and message in verdict.detail and verdict.certificate is None


def test_a_record_without_windows_has_no_mean(made: Small) -> None:
    probe = load_probe(made.published, Ledger(made.published), 10)
    for sources in ({}, {"nouns": SourceLoss(loss="40490fdb", windows=0)}):
        assert probe.model_copy(update={"sources": sources}).mean() is None


def test_a_damaged_window_is_an_input_fault(made: Small) -> None:
    key = "windows/nouns/held_out/00000.arrow"
    flip(made.published.path(f"mix/{key}"), made.release().stream.manifest.files[key].rows_at + 5)
    verdict = audited(made)
    assert verdict.outcome is Outcome.INPUT_FAULT and key in verdict.detail


def test_a_proof_copied_from_another_key_is_found(made: Small) -> None:
    verdict, thief = audited(made), load_or_create_key(made.folder / "keys", "thief")
    assert verdict.certificate
    body = Certificate.parse(verdict.certificate, "certificate").body.model_copy(update={"auditor": thief.public})
    stolen = verify(sign(body, thief), Ledger(made.published)).body
    with pytest.raises(CertificateFault, match="its proof of replay of held-out 10 is"):
        check_proofs(made.published, [stolen], "cpu")


@pytest.mark.parametrize(
    "change",
    [{"first_step": 5}, {"step": 10}, {"piece": "held-out 5"}, {"verdict": "no-match"}, {"recorded": "0" * 64}],
    ids=str,
)
def test_a_certificate_that_contradicts_itself(made: Small, change: dict[str, object]) -> None:
    key = load_or_create_key(made.folder / "keys", "auditor")
    certificate = audited(made).certificate
    assert certificate
    body = Certificate.parse(certificate, "certificate").body.model_copy(update=change)
    with pytest.raises(CertificateFault, match="certificate: its"):
        verify(sign(body, key), Ledger(made.published))


def test_the_last_state_is_chosen_and_its_certificate_kept(made: Small, tmp_path: Path) -> None:
    found = evaluation.check(
        made.published.uri, None, "cpu", str(tmp_path / "records"), str(made.folder / "keys"), lambda progress: None
    )
    assert (found["step"], found["verdict"], found["piece"]) == (12, "match", "held-out 12")
    assert json.loads(Path(found["certificate"]).read_bytes())["body"]["piece"] == "held-out 12"


def test_what_a_run_lacks_is_made_again(made: Small) -> None:
    path = made.store.path(probe_key(10))
    before = path.read_bytes()
    path.unlink()
    found = evaluation.make(str(made.folder), None, "cpu")
    assert [probe.step for probe in found] == [0, 5, 10, 12] and path.read_bytes() == before
