"""Settling nights: every date up to today gets its statement and its draw, or is admitted as missed.

Whichever slot of a schedule runs, and however late, the records end the same: a night that has a statement is drawn
from it, an earlier one without is missed, and today's is stated and, once its round is out, drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from storage.audit.beacon import Source, scheme
from storage.audit.draw import Draw, draw_key, load_draw, make_draw
from storage.audit.keys import Key
from storage.audit.statement import (
    Missed,
    Statement,
    admit_missed,
    announce,
    load_night,
    round_is_out,
    statement_key,
)
from storage.errors import MissingObject, Refused, VerbatimError
from storage.ledger import Ledger
from storage.store import Store


@dataclass(frozen=True)
class Settled:
    """What the records now hold. undrawn: date → why the draw of its statement could not be made: it must still be.

    draws: those of today and of this call, by date. due: when today's round comes out, where it is not drawn yet.
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
        raise Refused(f"{today} was called missed already", cause="a clock that was ahead", next_step="draw tomorrow")
    draws: dict[str, Draw] = {}
    missed: list[str] = []
    undrawn: dict[str, str] = {}
    for day in _before(records, ledger, today):
        night = _night(records, ledger, key, day, now)
        if isinstance(night, Missed):
            missed.append(day)
        elif not records.list(draw_key(ledger.run_id, day)):
            try:
                draws[day] = draw_once(records, ledger, night, source, now)
            except VerbatimError as error:  # today's draw must not wait for it, and it stays open for everyone to see
                undrawn[day] = error.message
    due = None
    if round_is_out(statement.body, now) is False:
        due = scheme(statement.body.scheme).time(statement.body.round)
    else:
        draws[today] = draw_once(records, ledger, statement, source, now)
    return Settled(statement, draws, missed, undrawn, due)


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


def _night(records: Store, ledger: Ledger, key: Key, day: str, now: datetime) -> Statement | Missed:
    try:
        return load_night(records, ledger, day)
    except MissingObject:
        return admit_missed(records, ledger, key, day, now)


def _before(records: Store, ledger: Ledger, today: str) -> Iterator[str]:
    """Every date from the first with a record to the one before `today`."""
    places = records.list(statement_key(ledger.run_id, "").removesuffix(".json"))
    days = sorted(place.rpartition("/")[2].removesuffix(".json") for place in places)
    if not days:
        return
    day, last = date.fromisoformat(days[0]), date.fromisoformat(today)
    while day < last:
        yield day.isoformat()
        day += timedelta(days=1)
