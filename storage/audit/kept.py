"""Records of audits that are published with a run: those of this run alone, each checked like a stranger's.

statements, witnesses and draws of <run>/, beacons/<date>.json    as in an auditor's records
certificates/<name>.json, disputes/<name>.json                    the same
evaluations/<state>-<digest>.json                                 scores on tasks, by whoever asked them

Those that were there when the release was signed are in its list; later ones lie below the same prefix.
"""

import re
from collections.abc import Iterator

from storage import olmes
from storage.audit.beacon import MAX_BEACON
from storage.audit.certificate import MAX_CERTIFICATE, Beacon, Body, Certificate, certificate_key, check, check_own
from storage.audit.dispute import MAX_DISPUTE, Dispute, dispute_key
from storage.audit.dispute import read as read_dispute
from storage.audit.draw import Draw, draw_key, load_draw
from storage.audit.statement import MAX_STATEMENT, check_night, parse_night, statement_key
from storage.audit.witness import parse_witness, witness_key
from storage.errors import CertificateFault, InputFault, MissingObject, Refused, UsageError
from storage.ledger import Ledger
from storage.mirrors import Beside
from storage.store import Readable, Store, object_digest

AUDITS = "audits/"  # where a release holds them
_DATED = re.compile(r".*/([^/]+)\.json")


def records_of(records: Readable, ledger: Ledger, base: str = "") -> dict[str, str]:
    """Key and digest of each record below `base` that is of this run, its statements first.

    Raises InputFault or CertificateFault for one that is damaged or forged. Other runs' records are passed over: one
    folder serves every run that its owner audits.
    """
    draws = list(_draws(records, ledger, base))
    found = dict([*_nights(records, ledger, base), *_witnesses(records, ledger, base)])
    found |= {base + draw_key(ledger.run_id, draw.date): object_digest(draw.canonical()) for draw in draws}
    for draw in draws:
        found |= _beacon(records, base, draw)
    found |= dict([*_certificates(records, ledger, base), *_disputes(records, ledger, base)])
    return found | {key: digest for key, (digest, _) in olmes.records_in(records, ledger, base).items()}


def find_draw(release: Store, records: Store, ledger: Ledger, date: str) -> Draw:
    """The draw of a date, from this machine's records or those in the release; Refused where neither has it."""
    try:
        return load_draw(records, ledger, date)
    except MissingObject:
        pass
    try:
        published = Beside(release, AUDITS.removesuffix("/"))
        return published.sound(draw_key(ledger.run_id, date), lambda store: load_draw(store, ledger, date))
    except MissingObject:
        raise Refused(
            f"no draw of {date} is recorded in {records.uri} or in {release.uri}",
            cause="the draw lies in another folder of records, or there was none",
            next_step="verbatim coverage STORE lists the draws that are known; --records names another folder",
        ) from None


def _nights(records: Readable, ledger: Ledger, base: str) -> Iterator[tuple[str, str]]:
    """Statements of this run's nights, and those that were missed."""
    for key in records.list(base + statement_key(ledger.run_id, "").removesuffix(".json")):
        data = records.read(key, limit=MAX_STATEMENT)
        night = parse_night(data, key)
        check_night(night, ledger)
        yield _named(key, base + statement_key(ledger.run_id, night.body.date)), object_digest(data)


def _witnesses(records: Readable, ledger: Ledger, base: str) -> Iterator[tuple[str, str]]:
    """What witnesses of this run's statements signed."""
    for key in records.list(f"{base}witnesses/{ledger.run_id[:16]}/"):
        data = records.read(key, limit=MAX_STATEMENT)
        body = parse_witness(data, key, ledger.run_id).body
        yield _named(key, base + witness_key(ledger.run_id, body.date, body.witness)), object_digest(data)


def _named(key: str, due: str) -> str:
    if key != due:
        raise InputFault(f"{key}: it is {due}", cause="the file was renamed")
    return key


def _draws(records: Readable, ledger: Ledger, base: str) -> Iterator[Draw]:
    """Every draw from this run."""
    for key in records.list(base + draw_key(ledger.run_id, "").removesuffix(".json")):
        match = _DATED.fullmatch(key)
        if not match or key != base + draw_key(ledger.run_id, match[1]):
            raise InputFault(f"{key} is not where a draw lies", cause="the file was renamed or moved")
        try:
            yield load_draw(records, ledger, match[1], base)
        except UsageError as error:
            raise InputFault(f"{key}: {error.message}", cause="the file was renamed") from None


def _beacon(records: Readable, base: str, draw: Draw) -> dict[str, str]:
    """The value that was kept for the draw's date, if it is the one that was drawn from."""
    key = f"{base}beacons/{draw.date}.json"
    if key not in records.list(key):
        return {}
    data = records.read(key, limit=MAX_BEACON)
    return {key: object_digest(data)} if Beacon.parse(data, key) == draw.beacon else {}


def _certificates(records: Readable, ledger: Ledger, base: str) -> Iterator[tuple[str, str]]:
    bodies: list[Body] = []
    for key in records.list(f"{base}certificates/"):
        data = records.read(key, limit=MAX_CERTIFICATE)
        certificate = Certificate.parse(data, key, CertificateFault)
        if certificate.body.run != ledger.run_id:
            continue
        body = check(certificate, ledger)
        if key != base + certificate_key(data, body):
            raise CertificateFault(f"{key}: it is {certificate_key(data, body)}", cause="the file was renamed")
        bodies.append(body)
        yield key, object_digest(data)
    check_own(bodies)


def _disputes(records: Readable, ledger: Ledger, base: str) -> Iterator[tuple[str, str]]:
    for key in records.list(f"{base}disputes/"):
        data = records.read(key, limit=MAX_DISPUTE)
        dispute = Dispute.parse(data, key, CertificateFault)
        if dispute.body.certificate.body.run != ledger.run_id:
            continue
        read_dispute(data, ledger)
        if key != base + dispute_key(data, dispute):
            raise CertificateFault(f"{key}: it is {dispute_key(data, dispute)}", cause="the file was renamed")
        yield key, object_digest(data)
