"""`verbatim sample`, `witness`: a night's statement, its witnesses, its draw; each as one plain value."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.audit.beacon import open_source
from storage.audit.keys import load_key, load_or_create_key
from storage.audit.settle import Settled, settle
from storage.audit.statement import MAX_STATEMENT, Statement, parse_night, round_is_out
from storage.audit.witness import bear_witness
from storage.errors import VerbatimError
from storage.ledger import Ledger
from storage.store import open_store


def sample(store: str, beacon: str, count: int, records: str, keys: Path) -> dict[str, Any]:
    """State today's draw and make every draw whose round is out; see settle()."""
    kept, ledger = open_store(records), Ledger(open_store(store))
    source = open_source(beacon, kept)
    return _settled(settle(kept, ledger, load_key(keys, "trainer"), source, count, datetime.now(UTC)))


def _settled(settled: Settled) -> dict[str, Any]:
    body = settled.statement.body
    draws = {date: {"steps": draw.steps, "record": draw.digest()} for date, draw in settled.draws.items()}
    today: dict[str, Any] = draws.get(body.date, {"steps": [], "record": None})
    due = settled.due.isoformat() if settled.due else None
    stated = {"date": body.date, "scheme": body.scheme, "round": body.round, "statement": settled.statement.digest()}
    return stated | today | {"due": due, "draws": draws, "missed": settled.missed, "undrawn": settled.undrawn}


def sample_lines(done: dict[str, Any], store: str) -> Iterator[str]:
    """The same for a person."""
    yield f"statement of {done['date']}: round {done['round']} of {done['scheme']} draws; digest {done['statement']}"
    for date in done["missed"]:
        yield f"{date}: missed: no statement was made"
    for date, why in done["undrawn"].items():
        yield f"{date}: not drawn, which counts against the run: {why}"
    for date, draw in done["draws"].items():
        yield f"draw of {date}: steps {', '.join(map(str, draw['steps']))}"
    where = shlex.quote(store)
    if done["due"]:
        yield f"next: verbatim witness {where}, by another; the round comes out at {done['due']}, then sample again"
    else:
        yield f"next: verbatim audit {where} --draw {done['date']} --step {done['steps'][0]}"


def witness(store: str, statements: str, records: str, keys: Path) -> list[dict[str, Any]]:
    """Witness every statement in the store `statements` whose round is not out; {statement, says, exit_code}."""
    ledger, source, kept = Ledger(open_store(store)), open_store(statements), open_store(records)
    key, now, done = load_or_create_key(keys, "witness"), datetime.now(UTC), []
    for place in source.list(f"statements/{ledger.run_id[:16]}/"):
        try:
            night = parse_night(source.read(place, limit=MAX_STATEMENT), place)
            if not isinstance(night, Statement) or round_is_out(night.body, now):
                continue
            signed = bear_witness(kept, ledger, key, night, now)
        except VerbatimError as error:
            done.append({"statement": place, "says": error.message, "exit_code": error.exit_code})
        else:
            said = f"seen at {signed.body.seen} by key {key.public}; {_when(night, now)}"
            done.append({"statement": place, "says": said, "exit_code": 0})
    return done


def _when(night: Statement, now: datetime) -> str:
    if round_is_out(night.body, now) is None:
        return "its round has no time: this shows only that it was not exchanged later"
    return f"round {night.body.round} is to come"


def witness_lines(done: list[dict[str, Any]]) -> Iterator[str]:
    """The same for a person."""
    for row in done:
        yield f"{'not witnessed' if row['exit_code'] else 'witnessed'}: {row['statement']}: {row['says']}"
    if not done:
        yield "no statement is waiting for its round: nothing to witness"
