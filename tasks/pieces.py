"""Opening a drawn step, and auditing parts of one, in plain Python: what `verbatim open` and `verbatim audit` call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.audit.kept import find_draw
from storage.audit.keys import load_or_create_key
from storage.audit.open import open_step
from storage.audit.opened import opening_key
from storage.audit.pieces import audit_piece
from storage.audit.verdict import Report
from storage.ledger import Ledger
from storage.mirrors import open_copies
from storage.store import open_store
from tasks.replay import saved


def open_drawn(store: str, step: int, draw: str, backend: str, records: str, report: Report) -> dict[str, Any]:
    """Make and publish the opening of a step that the draw of a date chose; what it holds, for JSON."""
    release, kept = open_copies([store]), open_store(records)
    opened = open_step(release, step, find_draw(release, kept, Ledger(release), draw), backend, report, kept)
    opening = opened.opening
    facts = {"step": step, "draw": opening.draw.date, "units": len(opening.nll), "tensor": opening.tensor}
    address = f"{opened.store.uri}/{opening_key(step)}"
    return facts | {"opening": address, "fingerprints": opened.fingerprints.size}


def audit(
    store: str,
    piece: str,
    draw: str,
    backend: str,
    records: str,
    keys: str,
    report: Report,
    mirrors: Sequence[str] = (),
) -> dict[str, Any]:
    """Audit "step N unit U", "step N sum" or "step N update"; arguments and result as those of replay.audit()."""
    release, kept = open_copies([store, *mirrors]), open_store(records)
    chosen = find_draw(release, kept, Ledger(release), draw)
    verdict = audit_piece(release, piece, chosen, backend, load_or_create_key(Path(keys), "auditor"), report)
    return verdict.document() | {"step": int(piece.split()[1]), "certificate": saved(records, kept, verdict)}
