"""Collecting what is said about a run's audits: every record of it in any number of stores, each one checked.

Stores are an auditor's, a witness's, the trainer's, or a release, which may hold records under audits/. A record that
does not check out is told and counts for nothing; one that contradicts the ledger with the trainer's signature is
a finding against the run (states.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from storage.audit.certificate import MAX_CERTIFICATE, Body, Certificate, verify
from storage.audit.draw import MAX_DRAW, Draw, parse_draw
from storage.audit.statement import MAX_STATEMENT, Missed, Statement, check_night, parse_night
from storage.audit.witness import Witness, parse_witness
from storage.errors import CertificateFault, Equivocation, InputFault
from storage.ledger import Ledger
from storage.store import Store

BASES = ("", "audits/")  # where records lie: in a store of their own, in a release


@dataclass
class Evidence:
    """Records of one run, each once. faulty: "store: key" → what is wrong; against: proofs of two histories."""

    statements: list[Statement] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    certificates: list[Body] = field(default_factory=list)
    faulty: dict[str, str] = field(default_factory=dict)
    against: list[str] = field(default_factory=list)


def collect(stores: Iterable[Store], ledger: Ledger) -> Evidence:
    """Everything that the stores hold about this run."""
    found, seen = Evidence(), set[bytes]()
    run = ledger.run_id[:16]

    def night(data: bytes, where: str) -> None:
        record = parse_night(data, where)
        check_night(record, ledger)
        if isinstance(record, Statement):
            found.statements.append(record)
        else:
            found.missed.append(record)

    def witness(data: bytes, where: str) -> None:
        found.witnesses.append(parse_witness(data, where))

    def draw(data: bytes, where: str) -> None:
        found.draws.append(parse_draw(data, where, ledger))

    def certificate(data: bytes, where: str) -> None:
        if Certificate.parse(data, where, CertificateFault).body.run == ledger.run_id:  # one folder serves many runs
            found.certificates.append(verify(data, ledger).body)

    kinds: list[tuple[str, int, Callable[[bytes, str], None]]] = [
        (f"statements/{run}/", MAX_STATEMENT, night),
        (f"witnesses/{run}/", MAX_STATEMENT, witness),
        (f"draws/{run}/", MAX_DRAW, draw),
        ("certificates/", MAX_CERTIFICATE, certificate),
    ]
    for store in stores:
        for folder, limit, take in ((base + name, limit, take) for base in BASES for name, limit, take in kinds):
            for key in store.list(folder):
                _take(store, key, limit, take, seen, found)
    return found


def _take(
    store: Store, key: str, limit: int, take: Callable[[bytes, str], None], seen: set[bytes], found: Evidence
) -> None:
    try:
        data = store.read(key, limit=limit)
        if data not in seen:
            seen.add(data)
            take(data, key)
    except Equivocation as error:
        found.against.append(error.message)
    except InputFault as error:
        found.faulty[f"{store.uri}: {key}"] = error.message
