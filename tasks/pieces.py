"""Opening a drawn step, and auditing parts of one, in plain Python: what `verbatim open` and `verbatim audit` call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.audit.draw import load_draw
from storage.audit.keys import load_or_create_key
from storage.audit.open import open_step
from storage.audit.opening import opening_key
from storage.audit.pieces import audit_piece
from storage.audit.verdict import Report
from storage.ledger import Ledger
from storage.store import open_store
from tasks.replay import saved


def open_drawn(store: str, step: int, draw: str, backend: str, records: str, report: Report) -> dict[str, Any]:
    """Make and publish the opening of a step that the draw of a date chose; what it holds, for JSON."""
    release, kept = open_store(store), open_store(records)
    opened = open_step(release, step, load_draw(kept, Ledger(release), draw), backend, report, kept)
    opening = opened.opening
    facts = {"step": step, "draw": opening.draw.date, "units": len(opening.nll), "tensor": opening.tensor}
    return facts | {"opening": opening_key(step), "fingerprints": opened.fingerprints.size}


def audit(store: str, piece: str, draw: str, backend: str, records: str, keys: str, report: Report) -> dict[str, Any]:
    """Audit "step N unit U", "step N sum" or "step N update"; the verdict's document, as that of replay.audit()."""
    release, kept = open_store(store), open_store(records)
    chosen = load_draw(kept, Ledger(release), draw)
    verdict = audit_piece(release, piece, chosen, backend, load_or_create_key(Path(keys), "auditor"), report)
    return verdict.document() | {"step": int(piece.split()[1]), "certificate": saved(records, kept, verdict)}
