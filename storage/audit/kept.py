"""Records of audits that are published with a run: those of this run alone, each checked like a stranger's.

draws/<run>/<date>.json    beacons/<date>.json    certificates/<name>.json    as in an auditor's records
"""

import re
from collections.abc import Iterator

from storage.audit.certificate import MAX_CERTIFICATE, Beacon, Body, Certificate, certificate_key, check_own, verify
from storage.audit.draw import MAX_BEACON, Draw, draw_key, load_draw
from storage.errors import CertificateFault, InputFault, UsageError
from storage.ledger import Ledger
from storage.store import Store, object_digest

AUDITS = "audits/"  # where a release holds them
_DATED = re.compile(r".*/([^/]+)\.json")


def records_of(records: Store, ledger: Ledger, base: str = "") -> dict[str, str]:
    """Key and digest of each record below `base` that is of this run, its draws first.

    Raises InputFault or CertificateFault for one that is damaged or forged. Other runs' records are passed over: one
    folder serves every run that its owner audits.
    """
    draws = list(_draws(records, ledger, base))
    found = {base + draw_key(ledger.run_id, draw.date): object_digest(draw.canonical()) for draw in draws}
    for draw in draws:
        found |= _beacon(records, base, draw)
    return found | dict(_certificates(records, ledger, base))


def _draws(records: Store, ledger: Ledger, base: str) -> Iterator[Draw]:
    """Every draw from this run."""
    for key in records.list(base + draw_key(ledger.run_id, "").removesuffix(".json")):
        match = _DATED.fullmatch(key)
        if not match or key != base + draw_key(ledger.run_id, match[1]):
            raise InputFault(f"{key} is not where a draw lies", cause="the file was renamed or moved")
        try:
            yield load_draw(records, ledger, match[1], base)
        except UsageError as error:
            raise InputFault(f"{key}: {error.message}", cause="the file was renamed") from None


def _beacon(records: Store, base: str, draw: Draw) -> dict[str, str]:
    """The value that was kept for the draw's date, if it is the one that was drawn from."""
    key = f"{base}beacons/{draw.date}.json"
    if key not in records.list(key):
        return {}
    data = records.read(key, limit=MAX_BEACON)
    return {key: object_digest(data)} if Beacon.parse(data, key) == draw.beacon else {}


def _certificates(records: Store, ledger: Ledger, base: str) -> Iterator[tuple[str, str]]:
    bodies: list[Body] = []
    for key in records.list(f"{base}certificates/"):
        data = records.read(key, limit=MAX_CERTIFICATE)
        if Certificate.parse(data, key, CertificateFault).body.run != ledger.run_id:
            continue
        body = verify(data, ledger).body
        if key != base + certificate_key(data, body):
            raise CertificateFault(f"{key}: it is {certificate_key(data, body)}", cause="the file was renamed")
        bodies.append(body)
        yield key, object_digest(data)
    check_own(bodies)
