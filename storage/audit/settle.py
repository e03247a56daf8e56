"""Settling nights: every date up to today gets its statement and its draw, or is admitted as missed.

Whichever slot of a schedule runs, and however late, the records end the same: a night that has a statement is drawn
from it, an earlier one without is missed, and today's is stated and, once its round is out, drawn.

A missed night is admitted only beside today's draw: where rounds have times, a clock that is ahead then finds no value,
and cannot give away nights that are still to come. A file's value holds no clock: what a trainer whose clock is ahead
states, draws and admits by it stands, on the trainer's word. Readers pass over nights that have not begun by their own
clock, and witnesses do not sign them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from storage.audit.beacon import Source, scheme
from storage.audit.draw import Draw, draw_key, load_draw, make_draw
from storage.audit.keys import Key
from storage.audit.statement import (
    Missed,
    Night,
    Statement,
    admit_missed,
    announce,
    is_date,
    load_night,
    round_is_out,
    statement_key,
)
from storage.audit.states import DEADLINE
from storage.errors import InputFault, MissingObject, Refused, VerbatimError
from storage.ledger import Ledger
from storage.store import Store


@dataclass(frozen=True)
class Settled:
    """What the records now hold. missed: nights without a statement.

    draws: those of today, of this call, and of nights whose deadline is to come, by date: who audits them may have been
    stopped. undrawn: date → why that night could not be settled: it must still be. due: when today's round comes out,
    where it is not drawn yet.
    """

    statement: Statement
    draws: dict[str, Draw]
    missed: list[str]
    undrawn: dict[str, str]
    due: datetime | None


def settle(records: Store, ledger: Ledger, key: Key, source: Source, count: int, now: datetime) -> Settled:
    """State today's draw of `count` steps, draw what is out, admit earlier nights without a statement as missed.

    Raises Refused where `key` is not the trainer's or nothing can be drawn from; today's draw raises what is wrong.
    """
    today = now.astimezone(UTC).date().isoformat()
    statement = announce(records, ledger, key, today, count, source, now)
    if isinstance(statement, Missed):
        raise Refused(
            f"the night of {today} was called missed already, which cannot be taken back",
            cause="a clock that was ahead when an earlier night was settled",
            next_step="set the clock; the first night that was not called missed is drawn again",
        )
    settled = Settled(statement, {}, [], {}, _due(statement, now))
    silent = _settle_earlier(records, ledger, source, settled, today, now)
    if settled.due is None:
        settled.draws[today] = draw_once(records, ledger, statement, source, now)
        for day in silent:
            admit_missed(records, ledger, key, day, now)
    return settled


def _settle_earlier(
    records: Store, ledger: Ledger, source: Source, settled: Settled, today: str, now: datetime
) -> list[str]:
    """Draw the nights before `today` that were stated, or take their draws. Returns those of which nothing was said.

    Today's draw must not wait for one that cannot be settled, which stays open for everyone to see.
    """
    drawn, silent = set(records.list(draw_key(ledger.run_id, "").removesuffix(".json"))), []
    due = (now.astimezone(UTC) - DEADLINE).date().isoformat()
    for day in _before(records, ledger, today):
        try:
            night = _night(records, ledger, day)
            if isinstance(night, Statement) and (day >= due or draw_key(ledger.run_id, day) not in drawn):
                settled.draws[day] = draw_once(records, ledger, night, source, now)
        except VerbatimError as error:
            settled.undrawn[day] = error.message
            continue
        if not isinstance(night, Statement):
            settled.missed.append(day)
        if night is None:
            silent.append(day)
    return silent


def _due(statement: Statement, now: datetime) -> datetime | None:
    """When the statement's round comes out; None where it is out, or nobody knows."""
    body = statement.body
    return scheme(body.scheme).time(body.round) if round_is_out(body, now) is False else None


def draw_once(records: Store, ledger: Ledger, statement: Statement, source: Source, now: datetime) -> Draw:
    """The draw of a statement: the recorded one, or made now with the value of its round."""
    try:
        return load_draw(records, ledger, statement.body.date)
    except MissingObject:
        pass
    if source.scheme != statement.body.scheme:
        raise Refused(
            f"the statement of {statement.body.date} names a round of {statement.body.scheme}, this is a source of "
            f"{source.scheme}",
            next_step="give the beacon that the statement names",
        )
    return make_draw(records, ledger, statement, source.fetch(statement.body.round), now)


def _night(records: Store, ledger: Ledger, day: str) -> Night | None:
    """What the trainer said of a night; None if nothing."""
    try:
        return load_night(records, ledger, day)
    except MissingObject:
        return None


def _before(records: Store, ledger: Ledger, today: str) -> Iterator[str]:
    """Every date from the first with a genuine record to the one before `today`."""
    folder = statement_key(ledger.run_id, "").removesuffix(".json")
    names = (key.removeprefix(folder).removesuffix(".json") for key in records.list(folder))
    first = next((day for day in sorted(filter(is_date, names)) if _is_genuine(records, ledger, day)), today)
    day, last = date.fromisoformat(first), date.fromisoformat(today)
    while day < last:
        yield day.isoformat()
        day += timedelta(days=1)


def _is_genuine(records: Store, ledger: Ledger, day: str) -> bool:
    try:
        return _night(records, ledger, day) is not None
    except InputFault:
        return False
