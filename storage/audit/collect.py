"""Collecting what is said about a run's audits: every record of it in any number of stores, each one checked.

Stores are an auditor's, a witness's, the trainer's, or a release, which may hold records under audits/: those that its
list names, and whatever came later. A record that does not check out, or that this user may not read, is told and
counts for nothing; one that contradicts the ledger with the trainer's signature is a finding against the run
(states.py).

Keys cost nothing, so strangers can sign without end: of what keys without a name say, MAX_UNLISTED bytes are held; the
rest is counted and passed over. It can't crowd out a key that the reader names.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage import olmes
from storage.audit.beacon import Value, prepare
from storage.audit.certificate import MAX_CERTIFICATE, Body, Certificate, check
from storage.audit.dispute import MAX_DISPUTE, Dispute
from storage.audit.dispute import read as read_dispute
from storage.audit.draw import MAX_DRAW, Draw, parse_draw
from storage.audit.statement import MAX_STATEMENT, Missed, Statement, check_night, parse_night
from storage.audit.witness import Witness, parse_witness
from storage.errors import CertificateFault, Equivocation, InputFault, NoPermission
from storage.ledger import Ledger
from storage.store import Store, object_digest

MAX_UNLISTED = 8 << 20  # some 4,000 certificates
MAX_FAULTY = 1000
MAX_DRAWS = 8  # of one night: two are enough to count against the run
_SIGNER = re.compile(  # of a certificate or dispute, scores, a witness: no string of canonical JSON holds a bare quote
    rb'("body":\{"auditor":|"evaluator":|"witness":)"(?P<key>[0-9a-f]{64})"'
)
BASES = ("", "audits/")  # where records lie: in a store of their own, in a release


@dataclass
class Evidence:
    """Records of one run, each once. disputes: "store: key" → the accuser's certificate, which is among the others.
    faulty: "store: key" → what is wrong; against: proofs of two histories. beyond: how many records were
    passed over, as there are too many of their kind: by keys without a name, faulty, draws of one night.
    found_in: address of each store that was read → how many records it has.
    """

    statements: list[Statement] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    certificates: list[Body] = field(default_factory=list)
    disputes: dict[str, Body] = field(default_factory=dict)
    evaluations: list[olmes.Body] = field(default_factory=list)
    faulty: dict[str, str] = field(default_factory=dict)
    against: list[str] = field(default_factory=list)
    beyond: int = 0
    found_in: dict[str, int] = field(default_factory=dict)


def collect(stores: Iterable[Store], ledger: Ledger, named: Collection[str] = ()) -> Evidence:
    """What the stores hold about this run. named: keys whose certificates and words are held however many there are."""
    collector = _Collector(ledger, named)
    for store in {store.uri: store for store in stores}.values():
        for base in BASES:
            collector.read(store, base)
    collector.take_draws()
    return collector.found


class _Collector:
    def __init__(self, ledger: Ledger, named: Collection[str]) -> None:
        self.found = Evidence()
        self._ledger, self._named, self._room, self._seen = ledger, frozenset(named), MAX_UNLISTED, set[str]()
        self._draws: dict[str, tuple[Draw, bytes]] = {}

    def read(self, store: Store, base: str) -> None:
        """Take every record below `base`; a record that was seen before is passed over, a draw is put by."""
        run, number = self._ledger.run_id[:16], self.found.found_in
        for folder, limit, take in (
            (f"statements/{run}/", MAX_STATEMENT, self._night),
            (f"witnesses/{run}/", MAX_STATEMENT, self._witness),
            (f"draws/{run}/", MAX_DRAW, self._put_by),
            ("certificates/", MAX_CERTIFICATE, self._certificate),
            ("disputes/", MAX_DISPUTE, self._dispute),
            ("evaluations/", olmes.MAX_RECORD, self._evaluation),
        ):
            with self._told(f"{store.uri}: {base}{folder}"):
                keys = store.list(base + folder)
                number[store.uri] = number.get(store.uri, 0) + len(keys)
                self._read_all(store, keys, limit, take)

    def _read_all(self, store: Store, keys: list[str], limit: int, take: Callable[[bytes, str], None]) -> None:
        for key in keys:
            where = f"{store.uri}: {key}"
            with self._told(where, among_many=True):
                data = store.read(key, limit=limit)
                if self._is_new(data) and not self._is_beyond(data):
                    take(data, where)

    def take_draws(self) -> None:
        """Check the draws that were read, their beacons' values together."""
        prepare([Value(draw.beacon, draw.evidence) for draw, _ in self._draws.values()])
        for where, (_, data) in self._draws.items():
            with self._told(where):
                self._draw(data, where)

    @contextmanager
    def _told(self, where: str, among_many: bool = False) -> Iterator[None]:
        try:
            yield
        except Equivocation as error:
            self.found.against.append(error.message)
        except (InputFault, NoPermission) as error:
            if among_many and len(self.found.faulty) >= MAX_FAULTY:
                self.found.beyond += 1
            else:
                self.found.faulty[where] = error.message

    def _is_new(self, data: bytes) -> bool:
        digest = object_digest(data)  # a stranger's disputes are too long to be held
        new = digest not in self._seen
        self._seen.add(digest)
        return new

    def _night(self, data: bytes, where: str) -> None:
        night = parse_night(data, where)
        check_night(night, self._ledger)
        if isinstance(night, Statement):
            self.found.statements.append(night)
        else:
            self.found.missed.append(night)

    def _witness(self, data: bytes, where: str) -> None:
        witness = parse_witness(data, where, self._ledger.run_id)
        self._hold(witness.body.witness, data)
        self.found.witnesses.append(witness)

    def _put_by(self, data: bytes, where: str) -> None:
        draw = Draw.parse(data, where)
        check_night(draw.statement, self._ledger)  # or any stranger could have curves computed and memory filled
        if sum(other.date == draw.date for other, _ in self._draws.values()) < MAX_DRAWS:
            self._draws[where] = draw, data
        else:
            self.found.beyond += 1

    def _draw(self, data: bytes, where: str) -> None:
        draw = parse_draw(data, where, self._ledger)
        self.found.draws.append(draw)
        if self._is_new(draw.statement.canonical()):
            self.found.statements.append(draw.statement)

    def _certificate(self, data: bytes, where: str) -> None:
        # One folder serves every run that its owner audits.
        certificate = Certificate.parse(data, where, CertificateFault)
        if certificate.body.run == self._ledger.run_id:
            self._hold(certificate.body.auditor, data)
            self.found.certificates.append(check(certificate, self._ledger))

    def _evaluation(self, data: bytes, where: str) -> None:
        record = olmes.Evaluation.parse(data, where, CertificateFault)
        if record.body.run == self._ledger.run_id:
            self._hold(record.body.evaluator, data)
            self.found.evaluations.append(olmes.check(record, where, self._ledger))

    def _dispute(self, data: bytes, where: str) -> None:
        certificate = Dispute.parse(data, where, CertificateFault).body.certificate
        if certificate.body.run != self._ledger.run_id:
            return
        read_dispute(data, self._ledger)
        self._hold(certificate.body.auditor, plain := certificate.canonical())
        self.found.disputes[where] = certificate.body
        if self._is_new(plain):
            self.found.certificates.append(certificate.body)

    def _hold(self, key: str, data: bytes) -> None:
        """Count what is held of what keys without a name said, before it is checked, which takes the most time."""
        self._room -= 0 if key in self._named else len(data)

    def _is_beyond(self, data: bytes) -> bool:
        """Whether it is signed by a key without a name, and there is no room for more of them."""
        if self._room > 0 or not (match := _SIGNER.search(data)):
            return False
        beyond = match["key"].decode() not in self._named
        self.found.beyond += beyond
        return beyond
