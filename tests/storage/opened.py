"""What tests of openings and pieces share: a draw of every step, and the verdicts on all pieces of step 6."""

from __future__ import annotations

from storage.audit.certificate import Beacon
from storage.audit.draw import Draw
from storage.audit.keys import Key
from storage.audit.pieces import audit_piece
from storage.audit.settle import draw_once
from storage.audit.statement import Statement, announce
from storage.audit.verdict import Verdict
from storage.ledger import Ledger
from storage.store import LocalStore
from tests.storage.conftest import Small
from tests.storage.drawn import Known, at

BEACON = Beacon(scheme="file", round=1, value="c0ffee" + "0" * 58)
STEP, UNITS = 6, 2
PIECES = [f"step {STEP} {part}" for part in ("unit 0", "unit 1", "sum", "update")]


def drawn(made: Small, date: str = "2026-11-29", beacon: Beacon = BEACON, count: int = 8) -> Draw:
    """A draw of every step, recorded beside the run."""
    return draw_from(made.release().ledger, made, date, beacon, count)


def draw_from(ledger: Ledger, made: Small, date: str = "2026-11-29", beacon: Beacon = BEACON, count: int = 8) -> Draw:
    """The same of another ledger by the run's trainer."""
    records = LocalStore(made.folder / "audits")
    statement = announce(records, ledger, made.key, date, count, Known(beacon), at(date))
    assert isinstance(statement, Statement)
    return draw_once(records, ledger, statement, Known(beacon), at(date))


def verdicts(made: Small, auditor: Key, draw: Draw | None = None) -> dict[str, Verdict]:
    return {piece: audit_piece(made.published, piece, draw or drawn(made), "cpu", auditor) for piece in PIECES}


def outcomes(found: dict[str, Verdict]) -> dict[str, str]:
    return {piece.removeprefix(f"step {STEP} "): verdict.outcome.label for piece, verdict in found.items()}


MATCHES = {"unit 0": "match", "unit 1": "match", "sum": "match", "update": "match"}
