"""Certificates that claim what their signer did not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from storage.audit.certificate import Certificate, check_own, sign, verify
from storage.audit.keys import Key, load_or_create_key
from storage.audit.proofs import check_proofs
from storage.audit.replay import audit_initial, audit_step
from storage.errors import CertificateFault
from tests.attacks import scene
from tests.attacks.scene import AT
from tests.storage.conftest import Small


@pytest.fixture
def thief(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "thief", "thief")


def changed(certificate: bytes, key: Key, **changes: Any) -> bytes:
    """The same claim with other fields, properly signed by `key`."""
    body = Certificate.parse(certificate, "certificate").body
    return sign(body.model_copy(update={"auditor": key.public} | changes), key)


@pytest.fixture
def certificates(honest: Small, auditor: Key) -> tuple[bytes, bytes]:
    step, initial = audit_step(honest.published, AT, "cpu", auditor), audit_initial(honest.published, "cpu", auditor)
    assert step.certificate and initial.certificate
    return step.certificate, initial.certificate


def test_the_unattacked_twins_are_genuine(
    honest: Small, certificates: tuple[bytes, bytes], thief: Key, ends: Callable[[str], None]
) -> None:
    ledger, audited = honest.release().ledger, audit_step(honest.published, AT, "generic:cpu", thief)
    own = audited.certificate
    assert own
    bodies = [verify(data, ledger).body for data in (*certificates, own)]
    check_own(bodies)
    check_proofs(honest.published, bodies, "cpu")
    ends(scene.said(audited))


def test_moved_to_another_step(
    honest: Small, certificates: tuple[bytes, bytes], auditor: Key, ends: Callable[[str], None]
) -> None:
    ledger = honest.release().ledger
    with pytest.raises(CertificateFault, match="piece is step 6, expected step 5"):
        verify(certificates[0], ledger, "step 5")
    with pytest.raises(CertificateFault, match="its reproduced step is 6, expected 5") as caught:
        verify(changed(certificates[0], auditor, piece="step 5", step=5), ledger)
    ends(scene.said(caught.value))


def test_moved_to_another_run(
    certificates: tuple[bytes, bytes], auditor: Key, tmp_path: Path, ends: Callable[[str], None]
) -> None:
    other = scene.trained(scene.begin(tmp_path / "begun", seed=8), tmp_path / "run").release().ledger
    for change in ({}, {"run": other.run_id}, {"run": other.run_id, "predecessor": other.link(AT)}):
        with pytest.raises(CertificateFault, match=r"its (run|predecessor|recorded entry) is ") as caught:
            verify(changed(certificates[0], auditor, **change), other)
        ends(scene.said(caught.value))


def test_moved_to_another_key(
    honest: Small, certificates: tuple[bytes, bytes], thief: Key, ends: Callable[[str], None]
) -> None:
    """The signature falls at once, a new one beside the original, and one alone when the proof is made again."""
    ledger = honest.release().ledger
    body = Certificate.parse(certificates[0], "certificate").body
    moved = Certificate.parse(certificates[0], "certificate").model_copy(
        update={"body": body.model_copy(update={"auditor": thief.public})}
    )
    with pytest.raises(CertificateFault, match="the signature is not that of key"):
        verify(moved.canonical(), ledger)
    resigned = verify(changed(certificates[0], thief), ledger).body
    with pytest.raises(CertificateFault, match="show the same proof of replay"):
        check_own([body, resigned])
    with pytest.raises(
        CertificateFault, match=f"certificate of key {thief.public}: its proof of replay of step 6"
    ) as caught:
        check_proofs(honest.published, [resigned], "cpu")
    ends(scene.said(caught.value))


@pytest.mark.parametrize("piece", [0, 1])
def test_signed_without_a_replay(
    honest: Small, certificates: tuple[bytes, bytes], thief: Key, piece: int, ends: Callable[[str], None]
) -> None:
    """The ledger gives every field but the proof; an invented one passes for genuine until somebody replays."""
    body = verify(changed(certificates[piece], thief, proof="5" * 64), honest.release().ledger).body
    with pytest.raises(CertificateFault, match=f"certificate of key {thief.public}: its proof of replay of") as caught:
        check_proofs(honest.published, [body], "cpu")
    ends(scene.said(caught.value))


def test_an_accusation_that_was_invented(honest: Small, certificates: tuple[bytes, bytes], thief: Key) -> None:
    body = Certificate.parse(certificates[0], "certificate").body
    assert not isinstance(body.reproduced, str)
    invented = body.reproduced.model_copy(update={"state": "5" * 64})
    data = changed(certificates[0], thief, verdict="no-match", reproduced=invented)
    with pytest.raises(CertificateFault, match=r"step 6 came out as \w+ here, it claims "):
        check_proofs(honest.published, [verify(data, honest.release().ledger).body], "cpu")


def test_by_the_command_line(honest: Small, certificates: tuple[bytes, bytes], thief: Key, tmp_path: Path) -> None:
    genuine, stolen = tmp_path / "genuine.json", tmp_path / "stolen.json"
    genuine.write_bytes(certificates[0])
    stolen.write_bytes(changed(certificates[0], thief))
    command = ["verify", str(honest.published.root)]
    for path, options in ((genuine, []), (genuine, ["--replay"]), (stolen, [])):
        done = CliRunner().invoke(app, [*command, str(path), *options])
        assert done.exit_code == 0 and "step 6 match, by key" in done.stdout
    done = CliRunner().invoke(app, [*command, str(stolen), "--replay"])
    assert isinstance(done.exception, CertificateFault) and "was invented, or copied" in str(done.exception)
