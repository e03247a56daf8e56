"""What tests of openings and pieces share: a draw of every step, and the verdicts on all pieces of step 6."""

from __future__ import annotations

from storage.audit.certificate import Beacon
from storage.audit.draw import Draw, make_draw
from storage.audit.keys import Key
from storage.audit.pieces import audit_piece
from storage.audit.verdict import Verdict
from storage.store import LocalStore
from tests.storage.conftest import Small

BEACON = Beacon(scheme="file", round=1, value="c0ffee" + "0" * 58)
STEP, UNITS = 6, 2
PIECES = [f"step {STEP} {part}" for part in ("unit 0", "unit 1", "sum", "update")]


def drawn(made: Small, date: str = "2026-11-29", beacon: Beacon = BEACON, count: int = 8) -> Draw:
    """A draw of every step, recorded beside the run."""
    return make_draw(LocalStore(made.folder / "audits"), made.release().ledger, date, beacon, count)


def verdicts(made: Small, auditor: Key, draw: Draw | None = None) -> dict[str, Verdict]:
    return {piece: audit_piece(made.published, piece, draw or drawn(made), "cpu", auditor) for piece in PIECES}


def outcomes(found: dict[str, Verdict]) -> dict[str, str]:
    return {piece.removeprefix(f"step {STEP} "): verdict.outcome.label for piece, verdict in found.items()}


MATCHES = {"unit 0": "match", "unit 1": "match", "sum": "match", "update": "match"}
