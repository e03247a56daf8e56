"""Records of audits that are published with a run: those of this run alone, each checked like a stranger's.

statements, witnesses and draws of <run>/, beacons/<date>.json, certificates/<name>.json    as in an auditor's records
"""

import re
from collections.abc import Iterator

from storage.audit.beacon import MAX_BEACON
from storage.audit.certificate import MAX_CERTIFICATE, Beacon, Body, Certificate, certificate_key, check_own, verify
from storage.audit.draw import draw_key, load_draw
from storage.audit.statement import MAX_STATEMENT, check_night, parse_night, statement_key
from storage.audit.witness import parse_witness, witness_key
from storage.errors import CertificateFault, InputFault
from storage.ledger import Ledger
from storage.store import Store

AUDITS = "audits/"  # where a release holds them
_DATED = re.compile(r".*/([^/]+)\.json")


def records_of(records: Store, ledger: Ledger, base: str = "") -> list[str]:
    """Keys of the records below `base` that are of this run, its statements first.

    Raises InputFault or CertificateFault for one that is damaged or forged. Other runs' records are passed over: one
    folder serves every run that its owner audits.
    """
    draws = list(_draws(records, ledger, base))
    keys = [*_nights(records, ledger, base), *_witnesses(records, ledger, base)]
    keys += [base + draw_key(ledger.run_id, date) for date, _ in draws]
    keys += [key for date, beacon in draws for key in _beacon(records, base, date, beacon)]
    return keys + list(_certificates(records, ledger, base))


def _nights(records: Store, ledger: Ledger, base: str) -> Iterator[str]:
    """Statements of this run's nights, and those that were missed."""
    for key in records.list(base + statement_key(ledger.run_id, "").removesuffix(".json")):
        night = parse_night(records.read(key, limit=MAX_STATEMENT), key)
        check_night(night, ledger)
        yield _named(key, base + statement_key(ledger.run_id, night.body.date))


def _witnesses(records: Store, ledger: Ledger, base: str) -> Iterator[str]:
    """What witnesses of this run's statements signed."""
    for key in records.list(f"{base}witnesses/{ledger.run_id[:16]}/"):
        body = parse_witness(records.read(key, limit=MAX_STATEMENT), key).body
        yield _named(key, base + witness_key(ledger.run_id, body.date, body.witness))


def _named(key: str, due: str) -> str:
    if key != due:
        raise InputFault(f"{key}: it is {due}", cause="the file was renamed")
    return key


def _draws(records: Store, ledger: Ledger, base: str) -> Iterator[tuple[str, Beacon]]:
    """(date, beacon) of every draw from this run."""
    for key in records.list(base + draw_key(ledger.run_id, "").removesuffix(".json")):
        if match := _DATED.fullmatch(key):
            yield match[1], load_draw(records, ledger, match[1], base).beacon


def _beacon(records: Store, base: str, date: str, drawn: Beacon) -> list[str]:
    """The value that was kept for this date, if it is the one that was drawn from."""
    key = f"{base}beacons/{date}.json"
    kept = records.list(key)
    return [key] if key in kept and Beacon.parse(records.read(key, limit=MAX_BEACON), key) == drawn else []


def _certificates(records: Store, ledger: Ledger, base: str) -> Iterator[str]:
    bodies: list[Body] = []
    for key in records.list(f"{base}certificates/"):
        data = records.read(key, limit=MAX_CERTIFICATE)
        if Certificate.parse(data, key, CertificateFault).body.run != ledger.run_id:
            continue
        body = verify(data, ledger).body
        if key != base + certificate_key(data, body):
            raise CertificateFault(f"{key}: it is {certificate_key(data, body)}", cause="the file was renamed")
        bodies.append(body)
        yield key
    check_own(bodies)
