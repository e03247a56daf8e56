"""Certificates: one flipped bit, or a move to another run, step or key, and they are refused with the reason."""

from pathlib import Path
from typing import Any

import pytest

from kernels import canonical
from storage.audit.certificate import Certificate, certificate_key, check_own, save_certificate, sign, verify
from storage.audit.keys import Key, load_or_create_key
from storage.audit.replay import audit_initial, audit_step
from storage.errors import CertificateFault
from storage.store import MemoryStore
from tests.storage.conftest import Small


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def certificate(made: Small, auditor: Key) -> bytes:
    data = audit_step(made.published, 6, "cpu", auditor).certificate
    assert data
    return data


def test_verifies_offline(made: Small, certificate: bytes, auditor: Key) -> None:
    checked = verify(certificate, made.run().ledger, "step 6")
    body = checked.body
    assert (body.verdict, body.piece, body.step, body.first_step) == ("match", "step 6", 6, 5)
    assert (body.auditor, body.run) == (auditor.public, made.run().ledger.run_id)
    assert body.provenance.backend == "cpu" and body.ended >= body.began


def test_every_flipped_bit_is_an_error(made: Small, certificate: bytes) -> None:
    ledger = made.run().ledger
    for position in range(0, len(certificate), 3):
        damaged = bytearray(certificate)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CertificateFault) as caught:
            verify(bytes(damaged), ledger)
        assert caught.value.exit_code == 11


def resigned(certificate: bytes, key: Key, **changes: Any) -> bytes:
    """The same claim with other fields, properly signed by `key`."""
    body = Certificate.parse(certificate, "certificate").body
    return sign(body.model_copy(update={"auditor": key.public} | changes), key)


FORGERIES: dict[str, dict[str, Any]] = {
    "its run is": {"run": "0" * 64},
    "do not belong together": {"piece": "step 06"},
    "reproduced step": {"step": 7},
    "predecessor": {"predecessor": "0" * 64},
    "recorded entry": {"recorded": "0" * 64},
    "its verdict is no-match": {"verdict": "no-match"},
    "mix root": {"mix_root": "0" * 64},
    "claims step 8": {"piece": "step 8"},
    "the ledger holds 12 steps": {"piece": "step 99", "step": 99},
    "from state 7": {"first_step": 7},
}


@pytest.mark.parametrize("reason", FORGERIES)
def test_forged_claim_is_refused_even_with_a_good_signature(
    made: Small, certificate: bytes, auditor: Key, reason: str
) -> None:
    with pytest.raises(CertificateFault, match=reason):
        verify(resigned(certificate, auditor, **FORGERIES[reason]), made.run().ledger)


def test_forged_entry(made: Small, certificate: bytes, auditor: Key) -> None:
    other = made.run().ledger[6].model_copy(update={"loss": "3f800000"})
    with pytest.raises(CertificateFault, match="its verdict is match, expected no-match"):
        verify(resigned(certificate, auditor, reproduced=other), made.run().ledger)


def test_other_conformance_digest(made: Small, certificate: bytes, auditor: Key) -> None:
    used = Certificate.parse(certificate, "certificate").body.provenance
    for field, value in (("conformance", "0" * 64), ("contract", "verbatim-1999")):
        with pytest.raises(CertificateFault, match=field):
            changed = used.model_copy(update={field: value})
            verify(resigned(certificate, auditor, provenance=changed), made.run().ledger)


def test_moved_to_another_key(made: Small, certificate: bytes, tmp_path: Path) -> None:
    thief = load_or_create_key(tmp_path / "thief", "thief")
    document = canonical.loads(certificate)
    document["body"]["auditor"] = thief.public
    with pytest.raises(CertificateFault, match="signature is not that of key"):
        verify(canonical.dumps(document), made.run().ledger)


def test_a_copied_proof_is_found_beside_the_one_it_was_copied_from(
    made: Small, certificate: bytes, auditor: Key, tmp_path: Path
) -> None:
    thief, ledger = load_or_create_key(tmp_path / "thief", "thief"), made.run().ledger
    copied = verify(resigned(certificate, thief, auditor=thief.public), ledger).body  # alone, it only needs a replay
    own = audit_step(made.published, 6, "cpu", thief).certificate
    honest = verify(certificate, ledger).body
    assert own is not None
    check_own([honest, honest, verify(own, ledger).body])
    with pytest.raises(CertificateFault, match=f"keys {auditor.public} and {thief.public} show the same proof"):
        check_own([honest, copied])


def test_moved_to_another_step(made: Small, certificate: bytes) -> None:
    with pytest.raises(CertificateFault, match="piece is step 6, expected step 7"):
        verify(certificate, made.run().ledger, "step 7")


def test_initial_certificate(made: Small, auditor: Key) -> None:
    data = audit_initial(made.published, "cpu", auditor).certificate
    assert data and verify(data, made.run().ledger, "initial").body.verdict == "match"
    for reason, change in {"recorded initial root": {"recorded": "0" * 64}, "its step": {"step": 3},
                           "verdict is match": {"reproduced": "0" * 64}}.items():  # fmt: skip
        with pytest.raises(CertificateFault, match=reason):
            verify(resigned(data, auditor, **change), made.run().ledger)


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"x" * 70_000, b'{"body":{},"signature":""}'])
def test_hostile_bytes(made: Small, data: bytes) -> None:
    with pytest.raises(CertificateFault):
        verify(data, made.run().ledger)


def test_saved_under_a_name_of_its_own(certificate: bytes, tmp_path: Path, auditor: Key) -> None:
    store = MemoryStore(str(tmp_path))
    key = save_certificate(store, certificate)
    assert key == certificate_key(certificate, Certificate.parse(certificate, "c").body)
    assert key.startswith(f"certificates/step-6-{auditor.public[:16]}-") and store.read(key) == certificate
    assert save_certificate(store, certificate) == key
