"""What comes after a release was signed: found in no list, by listing two prefixes, and proven each by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows import checks
from flows.coverage import report
from storage.audit.certificate import save_certificate
from storage.audit.dispute import save_dispute
from storage.audit.draw import draw_key
from storage.audit.keys import Key, load_or_create_key
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.settle import settle
from storage.errors import CertificateFault, InputFault
from storage.mirrors import open_copies
from storage.publish import publish
from storage.store import LocalStore
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.drawn import BEACON, DATE, Known, at, disputed
from tests.storage.test_publish import everything

FLAWED = 8


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def records(made: Small, auditor: Key) -> LocalStore:
    """An auditor's, made after the release: a draw, a certificate of what it drew, and a dispute."""
    kept, ledger = LocalStore(made.folder / "records"), made.run().ledger
    draw = settle(kept, ledger, made.key, Known(BEACON), 1, at(DATE)).draws[DATE]
    data = audit_step(made.published, draw.steps[0], "cpu", auditor, draw).certificate
    with small.stand_in(flaw=FLAWED):
        accusation = audit_step(made.published, FLAWED, "cpu", auditor).certificate
    assert data and accusation
    save_certificate(kept, data)
    save_dispute(kept, disputed(accusation, auditor))
    return kept


@pytest.fixture
def later(made: Small, records: LocalStore) -> LocalStore:
    """The release with these records beside its list."""
    publish(made.store, made.mix, made.published, made.key, records)
    return made.published


def test_publishing_again_adds_records_beside_the_list(made: Small, records: LocalStore) -> None:
    before = everything(made.published)
    first = publish(made.store, made.mix, made.published, made.key, records)
    added = {f"audits/{key}": data for key, data in everything(records).items()}
    assert first.copied == len(added) == 4 and everything(made.published) == before | added
    again = publish(made.store, made.mix, made.published, made.key, records)
    assert again.copied == 0 and again.release == first.release == check_release(made.published).body
    assert not again.release.objects.keys() & added.keys()


def test_what_comes_later_is_found_and_counted(made: Small, later: LocalStore, auditor: Key, tmp_path: Path) -> None:
    said = {line["what"]: line["says"] for line in checks.release([later.uri])}
    kinds = {what: says for what, says in said.items() if what.startswith("later ")}
    one = "1, none listed, each proven"
    assert kinds == {f"later {kind}": one for kind in ("certificates", "disputes", "draws", "statements")}
    named = tmp_path / "named.txt"
    named.write_text(f"{auditor.public} Ada\n", encoding="utf-8")
    found = report(later.uri, [], named)
    assert len(found["drawn"]) == 1 and found["certificates"] == 2 and found["faulty"] == {}
    (dispute,) = found["disputes"]
    assert (dispute["step"], dispute["by"]) == (FLAWED, "Ada") and ": audits/disputes/step-8-" in dispute["where"]
    assert found["levels"][FLAWED] == "disputed" and found["exit_code"] == 10


def test_verifying_lists_a_copy_once(later: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    listings, honest = [], LocalStore.list

    def counted(store: LocalStore, prefix: str = "") -> list[str]:
        listings.append((store.uri, prefix))
        return honest(store, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    checks.release([later.uri])
    assert listings.count((later.uri, "")) == 1


def test_what_was_there_is_listed_and_never_said_to_be_later(made: Small, records: LocalStore, tmp_path: Path) -> None:
    whole = LocalStore(tmp_path / "whole")
    body = publish(made.store, made.mix, whole, made.key, records).release
    assert body.classes["disputes"].count == 1 and check_release(whole).body == body
    assert not [line for line in checks.release([whole.uri]) if line["what"].startswith("later ")]
    listed = next(iter(body.classes["disputes"].objects))
    whole.path(listed).unlink()
    with pytest.raises(InputFault, match=f"there is no {listed}"):
        check_release(whole)


@pytest.mark.parametrize("folder", ["certificates/", "disputes/", "draws/", "statements/"])
def test_a_later_record_that_was_damaged_is_found(later: LocalStore, folder: str) -> None:
    (key,) = later.list(f"audits/{folder}")
    flip(later.path(key), 300)
    with pytest.raises(InputFault):
        check_release(later)


def test_a_later_record_in_one_copy_alone_is_checked_there(made: Small, later: LocalStore) -> None:
    second = LocalStore(made.folder / "second")
    shutil.copytree(later.root, second.root)
    copies = [later.uri, second.uri]
    assert check_release(open_copies(copies, cached=False)).body.steps == 12
    (key,) = second.list("audits/disputes/")
    flip(second.path(key), 300)
    with pytest.raises(CertificateFault):
        check_release(open_copies(copies, cached=False))


@pytest.mark.parametrize("name", ["beacons/2026-11-30.json", "disputes/mine.json", "certificates/mine.json"])
def test_what_is_put_there_under_another_name_or_for_no_draw(later: LocalStore, name: str) -> None:
    folder = name.split("/")[0] + "/"
    data = later.read(later.list(f"audits/{folder}")[0]) if folder != "beacons/" else BEACON.canonical()
    later.create(f"audits/{name}", data)
    with pytest.raises(InputFault, match=r"the file was renamed|is no record of an audit"):
        check_release(later)


def test_a_draw_that_lies_elsewhere_is_not_listed_and_not_later(made: Small, later: LocalStore) -> None:
    later.create("draws/x/2026-11-29.json", later.read("audits/" + draw_key(made.run().ledger.run_id, DATE)))
    with pytest.raises(InputFault, match=r"holds draws/x/2026-11-29\.json, which RELEASE\.json does not list"):
        check_release(later)


def test_verify_takes_a_dispute_file(made: Small, records: LocalStore, auditor: Key, tmp_path: Path) -> None:
    path = records.path(records.list("disputes/")[0])
    (line,) = checks.records([made.published.uri], [path])
    assert line["says"] == f"dispute of step {FLAWED}, by key {auditor.public}: verbatim dispute judges it"
    with small.stand_in(flaw=FLAWED):
        mine = audit_step(made.published, FLAWED, "cpu", auditor).certificate
    assert mine
    forged = tmp_path / "forged.json"
    forged.write_bytes(disputed(mine, auditor, signer=made.key))
    with pytest.raises(CertificateFault, match="the signature is not that of key"):
        checks.records([made.published.uri], [forged])
