"""Disputes, by everyone who could be wrong: the ledger, the accuser, the judge's machine, the file."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

import kernels
from flows.cli import app
from flows.disputes import RIGHT
from kernels import canonical
from storage.audit import dispute
from storage.audit.certificate import Certificate, verify
from storage.audit.dispute import Claim, Dispute, Done, Judgement, accuse, judge, read, save_dispute
from storage.audit.keys import Key, load_or_create_key
from storage.audit.narrow import Place
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.errors import CertificateFault, UsageError
from storage.store import MemoryStore
from tests.attacks import scene
from tests.attacks.scene import AT
from tests.storage.conftest import Small

WRONG = "project of blocks.000.q, unit 0"  # where wrong_project() first goes wrong


def wrong_project() -> AbstractContextManager[Any]:
    """The cpu backend's projections off by one bit."""
    backend = kernels.backend("cpu")
    honest = backend.project

    def project(*arguments: Any) -> Any:
        result = honest(*arguments)
        result[0, 0] ^= 1
        return result

    return mock.patch.object(backend, "project", project)


@pytest.fixture
def third(tmp_path: Path) -> Key:
    """Whoever judges."""
    return load_or_create_key(tmp_path / "third", "third")


@pytest.fixture(scope="package")
def forged(begun: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A run with an integer added to a gradient in step AT, and checkpoints 0, 7 and 8."""
    cheat = scene.added_to_a_gradient("blocks.000.gate_up")
    return scene.trained(begun, tmp_path_factory.mktemp("forged") / "run", cheat, every=AT + 1)


@pytest.fixture(scope="package")
def accused(forged: Small, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An honest dispute of the forged step, by one who was asked about the step after it."""
    key = load_or_create_key(tmp_path_factory.mktemp("accuser"), "auditor")
    verdict, data = accuse(forged.published, AT, "cpu", "reference", key)
    assert (verdict.outcome, verdict.differs_at) == (Outcome.NO_MATCH, AT) and data
    return data


def lie(made: Small, key: Key) -> bytes:
    """A dispute by one whose replay went wrong, and who saw to it that nothing contradicted him."""
    with scene.in_step(AT, wrong_project), mock.patch.object(dispute, "_check_second", lambda *arguments: None):
        data = accuse(made.published, AT, "cpu", "reference", key)[1]
    assert data
    return data


def decided(judgement: Judgement) -> tuple[Outcome, str, str]:
    return judgement.verdict.outcome, judgement.right, judgement.differs


@pytest.mark.parametrize("backend", scene.quick([*kernels.HOSTS, "generic:cpu"], "cpu"))
def test_the_accuser_is_right(forged: Small, accused: bytes, third: Key, backend: str) -> None:
    judgement = judge(forged.published, accused, backend, third)
    assert decided(judgement) == (Outcome.NO_MATCH, "accuser", "")
    claim = read(accused, forged.release().ledger).body
    assert (judgement.place, judgement.contradicted) == (claim.place, claim.contradicted)
    assert judgement.contradicted == "linear_backward of blocks.000.gate_up, in some unit"
    assert claim.place and claim.place.model_copy(update={"recorded": "0" * 8, "found": "0" * 8}) == Place(
        tensor="m/blocks.000.gate_up", leaf=0, row=0, values=1, recorded="0" * 8, found="0" * 8
    )
    assert judgement.verdict.certificate and verify(judgement.verdict.certificate, forged.release().ledger)
    assert judgement.document()["right"] == "accuser" and judgement.document()["exit_code"] == 10


def test_the_ledger_is_right(honest: Small, auditor: Key, third: Key) -> None:
    judgement = judge(honest.published, lie(honest, auditor), "cpu", third)
    assert decided(judgement) == (Outcome.MATCH, "ledger", WRONG)
    assert (judgement.accuser, judgement.place, judgement.contradicted) == (auditor.public, None, "")


def test_neither_is_right(forged: Small, auditor: Key, third: Key) -> None:
    judgement = judge(forged.published, lie(forged, auditor), "cpu", third)
    assert decided(judgement) == (Outcome.NO_MATCH, "neither", WRONG)
    assert judgement.contradicted == "linear_backward of blocks.000.gate_up, in some unit"


def test_a_judge_whose_machine_is_wrong_decides_nothing(forged: Small, accused: bytes, third: Key) -> None:
    with scene.in_step(AT, wrong_project):
        judgement = judge(forged.published, accused, "cpu", third)
    assert decided(judgement) == (Outcome.MACHINE_FAULT, "", WRONG)
    assert judgement.verdict.certificate is None and "the reference gives another result" in judgement.verdict.detail


@pytest.mark.slow
def test_a_right_accusation_with_an_invented_trace(forged: Small, accused: bytes, auditor: Key, third: Key) -> None:
    """The entry decides; the operation that was invented is named."""
    claim = read(accused, forged.release().ledger).body
    invented = [done.operation() for done in claim.operations]
    invented[30] = invented[30]._replace(outputs="0" * 64)
    operations = [Done(**operation._asdict()) for operation in invented]
    own = audit_step(forged.published, AT, "cpu", auditor).certificate
    assert own
    certificate = Certificate.parse(own, "certificate")
    other = claim.model_copy(update={"operations": operations, "certificate": certificate})
    signed = Dispute(body=other, signature=auditor.sign(other.canonical(), dispute.PURPOSE)).canonical()
    judgement = judge(forged.published, signed, "cpu", third)
    assert decided(judgement) == (Outcome.NO_MATCH, "accuser", str(invented[30]))


def test_an_accuser_whose_backends_disagree_accuses_nobody(honest: Small, auditor: Key) -> None:
    with scene.in_step(AT, wrong_project):
        verdict, data = accuse(honest.published, AT, "cpu", "reference", auditor)
    assert (verdict.outcome, verdict.certificate, data) == (Outcome.MACHINE_FAULT, None, None)
    assert f"they part at {WRONG}" in verdict.detail


@pytest.mark.slow
def test_a_step_on_the_way_is_the_one_disputed(begun: Small, auditor: Key, tmp_path: Path) -> None:
    made = scene.trained(begun, tmp_path / "run", scene.no_update)
    verdict, data = accuse(made.published, AT + 1, "cpu", "reference", auditor)
    assert (verdict.piece, verdict.differs_at) == (f"step {AT}", AT) and data
    assert read(data, made.release().ledger).body.contradicted == "adamw of blocks.000.attn_norm"


def test_a_match_is_no_dispute(honest: Small, auditor: Key) -> None:
    verdict, data = accuse(honest.published, AT, "cpu", "reference", auditor)
    assert (verdict.outcome, data) == (Outcome.MATCH, None) and verdict.certificate
    with pytest.raises(UsageError, match="a second backend is needed"):
        accuse(honest.published, AT, "cpu", "cpu", auditor)


def test_a_changed_or_moved_file_is_refused(forged: Small, honest: Small, accused: bytes, third: Key) -> None:
    ledger = forged.release().ledger
    for position in range(0, len(accused), 401):
        damaged = bytearray(accused)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CertificateFault):
            read(bytes(damaged), ledger)
    for data in (b"", b"{}", b"[" * 100_000):
        with pytest.raises(CertificateFault):
            read(data, ledger)
    with pytest.raises(CertificateFault, match="its recorded entry is"):  # another ledger of the same run
        judge(honest.published, accused, "cpu", third)


def test_a_file_about_another_claim_is_refused(honest: Small, accused: bytes, auditor: Key, third: Key) -> None:
    claim = Dispute.parse(accused, "dispute").body
    match = audit_step(honest.published, AT, "cpu", auditor).certificate
    assert match
    document = claim.document() | {"certificate": canonical.loads(match)}
    other = Claim.model_validate(document)
    for key, reason in ((third, "the signature is not that of key"), (auditor, "its certificate says match of step 6")):
        signed = Dispute(body=other, signature=key.sign(other.canonical(), dispute.PURPOSE)).canonical()
        with pytest.raises(CertificateFault, match=reason):
            read(signed, honest.release().ledger)


def test_saved_under_a_name_of_its_own(accused: bytes) -> None:
    store = MemoryStore("disputes")
    key = save_dispute(store, accused)
    assert key.startswith(f"disputes/step-{AT}-") and store.read(key) == accused


def typed(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, output) of a command line."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout


@pytest.mark.slow
def test_by_the_command_line(forged: Small, tmp_path: Path) -> None:
    store, own, other = forged.published.root, tmp_path / "accuser", tmp_path / "judge"
    command = ("accuse", store, "--step", str(AT), "--second", "generic:cpu", "--records", own, "--keys", own)
    code, said = typed(*command, "--json")
    accusation = json.loads(said)
    assert (code, accusation["verdict"], accusation["differs_at"]) == (10, "no-match", AT)
    assert Path(accusation["certificate"]).exists()
    judging = ("dispute", accusation["dispute"], store, "--records", other, "--keys", other)
    code, said = typed(*judging, "--json")
    judgement = json.loads(said)
    assert (code, judgement["right"], judgement["differs"]) == (10, "accuser", "")
    assert judgement["contradicted"] == "linear_backward of blocks.000.gate_up, in some unit"
    assert (judgement["place"]["tensor"], judgement["place"]["row"]) == ("m/blocks.000.gate_up", 0)
    assert Path(judgement["certificate"]).parent == other / "certificates"
    code, said = typed(*judging)
    assert code == 10 and RIGHT["accuser"] in said and "m/blocks.000.gate_up, leaf 0, row 0" in said
    assert "next: give it to others, for: verbatim dispute FILE" in typed(*command)[1]
