"""Head statements: what a run was, and which round to come will draw from it, signed before anyone knew that round.

    statements/<run>/<date>.json    the trainer's statement of a night, or that it missed the night

A night has one statement. It fixes everything that a draw follows from but the beacon's value: head, date, how many
steps. That it was made before the round is out is for witnesses to say (witness.py).
"""

from datetime import UTC, datetime, time, timedelta
from datetime import date as calendar_date
from typing import Annotated, Literal

from pydantic import Field

from kernels.digest import digest
from storage.audit.beacon import LEAD, Source, scheme
from storage.audit.keys import Key, verify_signature
from storage.errors import Equivocation, InputFault, MissingObject, Refused, UsageError
from storage.ledger import Ledger
from storage.records import Count, Digest, Record, Signature, Text
from storage.store import Store

MAX_STATEMENT = 1 << 14
PURPOSE = "statement"
_MISSED = b'{"body":{"date":'
FORM = "%Y-%m-%dT%H:%M:%SZ"
YEARS = range(2023, 3000)  # from the beacon's first round on; a stranger's date must not overflow a sum of dates
MAX_COUNT = 100_000  # steps of one draw: its record stays below MAX_DRAW


class StatementBody(Record):
    """The draw of `date`: `count` of the steps before `step`, after which the ledger's head is `head`."""

    kind: Literal["statement"] = "statement"
    run: Digest
    date: Text
    step: Count
    head: Digest
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    scheme: Text
    round: Count


class Statement(Record):
    """A statement, signed by the key that the ledger's header names."""

    body: StatementBody
    signature: Signature

    def digest(self) -> str:
        """What a witness names."""
        return digest(self.canonical(), PURPOSE)


class MissedBody(Record):
    """The trainer made no statement on this date; written: when it said so."""

    kind: Literal["missed"] = "missed"
    run: Digest
    date: Text
    written: Text


class Missed(Record):
    """A missed night, admitted by the trainer."""

    body: MissedBody
    signature: Signature


Night = Statement | Missed


def statement_key(run: str, date: str) -> str:
    """Where the statement of a night lies: `create` lets it have only one."""
    return f"statements/{run[:16]}/{date}.json"


def check_date(date: str) -> None:
    """UsageError unless the date is written as 2026-11-29, and in YEARS."""
    if not is_date(date):
        raise UsageError(
            f"{date!r} is not the date of a night",
            cause="a slip, or a clock that is wrong",
            next_step=f"write it as 2026-11-29, of a year from {YEARS[0]} to {YEARS[-1]}",
        )


def is_date(text: str) -> bool:
    """Whether a night can have this date."""
    try:
        date = calendar_date.fromisoformat(text)
    except ValueError:
        return False
    return date.isoformat() == text and date.year in YEARS


def begins(date: str) -> datetime:
    """When a night begins, which a statement of it cannot be older than: midnight, UTC."""
    return datetime.combine(calendar_date.fromisoformat(date), time(), UTC)


def announce(records: Store, ledger: Ledger, key: Key, date: str, count: int, source: Source, now: datetime) -> Night:
    """The trainer's statement of a night: made now, or the one that was made first.

    Raises Refused where `key` is not the run's trainer, or nothing can be drawn from.
    """
    check_date(date)
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"a draw of {count} steps", next_step=f"draw between 1 and {MAX_COUNT} steps")
    _check_trainer(ledger, key)
    if not len(ledger):
        raise Refused("the ledger has no steps: there is nothing to draw from")
    body = StatementBody(
        run=ledger.run_id,
        date=date,
        step=len(ledger),
        head=ledger.head,
        count=min(count, len(ledger)),
        scheme=source.scheme,
        round=source.coming(now),
    )
    return first(records, ledger, Statement(body=body, signature=key.sign(body.canonical(), PURPOSE)))


def admit_missed(records: Store, ledger: Ledger, key: Key, date: str, now: datetime) -> Night:
    """Say that a night was missed; the statement of the night, if there is one after all."""
    _check_trainer(ledger, key)
    body = MissedBody(run=ledger.run_id, date=date, written=now.astimezone(UTC).strftime(FORM))
    return first(records, ledger, Missed(body=body, signature=key.sign(body.canonical(), PURPOSE)))


def first(records: Store, ledger: Ledger, night: Night) -> Night:
    """Record what is said of a night, and return what stands: of two that raced, the first."""
    date = night.body.date
    try:
        return load_night(records, ledger, date)
    except MissingObject:
        check_night(night, ledger)  # or a record that nobody accepts would stand for ever
    records.create(statement_key(ledger.run_id, date), night.canonical())
    return load_night(records, ledger, date)


def _check_trainer(ledger: Ledger, key: Key) -> None:
    if key.public != ledger.header.trainer:
        raise Refused(
            f"the key {key.public} is not the run's trainer {ledger.header.trainer}, whose word a draw needs",
            cause="another key folder than in training, or another's run",
            next_step="verbatim next names a step that was drawn already; who has the trainer's key draws, by verbatim "
            "sample --keys FOLDER, or from the UI of the machine that trained",
        )


def load_night(records: Store, ledger: Ledger, date: str) -> Night:
    """The recorded statement of a night, or that it was missed; MissingObject if neither is there."""
    check_date(date)
    key = statement_key(ledger.run_id, date)
    night = parse_night(records.read(key, limit=MAX_STATEMENT), key)
    check_night(night, ledger)
    if night.body.date != date:
        raise InputFault(f"{key} is of {night.body.date}", cause="the record was renamed")
    return night


def parse_night(data: bytes, where: str) -> Night:
    """The record, by its kind; InputFault unless it is one of the two forms."""
    form = Missed if data.startswith(_MISSED) else Statement
    return form.parse(data, where)


def check_night(night: Night, ledger: Ledger) -> None:
    """InputFault unless the trainer of this run signed it; Equivocation if its head is not the ledger's there."""
    _check_signed(night, ledger)
    if isinstance(night, Statement):
        _check_statement(night.body, ledger)


def _check_signed(night: Night, ledger: Ledger) -> None:
    body = night.body
    if not is_date(body.date):
        raise InputFault(f"a statement is of {body.date[:40]!r}, which is no date of a night")
    if body.run != ledger.run_id:
        raise InputFault(f"the statement of {body.date} is of run {body.run}, not of run {ledger.run_id}")
    if not verify_signature(ledger.header.trainer, night.signature, body.canonical(), PURPOSE):
        raise InputFault(
            f"the statement of {body.date} is not signed by the run's trainer {ledger.header.trainer}",
            cause="the record was edited, or another made it",
        )


def _check_statement(body: StatementBody, ledger: Ledger) -> None:
    scheme(body.scheme)
    if body.step > len(ledger):
        raise InputFault(
            f"the statement of {body.date} is of {body.step} steps, the ledger holds {len(ledger)}",
            cause="the run went on after this release",
            next_step="get its newer release",
        )
    if not body.count <= body.step:
        raise InputFault(f"the statement of {body.date} draws {body.count} of {body.step} steps")
    _check_round(body)
    if body.head != (head := ledger.link(body.step)):
        raise equivocation(body.step, body.head, f"the statement of {body.date}", head, "the ledger")


def _check_round(body: StatementBody) -> None:
    """InputFault unless the round comes out on the night itself: a missed one cannot be made good later."""
    due = scheme(body.scheme).time(body.round)
    night = begins(body.date)
    if due is not None and not night <= due < night + timedelta(days=1) + 2 * LEAD:  # stated just before midnight
        raise InputFault(
            f"the statement of {body.date} names round {body.round} of {body.scheme}, which comes out at {due}",
            cause="a missed night was to be filled later",
        )


def equivocation(step: int, one: str, where: str, other: str, there: str) -> Equivocation:
    """The error for two heads after one step, both signed by the trainer."""
    return Equivocation(
        f"after {step} steps {where} has head {one}, {there} has {other}: the run's trainer signed both",
        cause="the trainer shows different histories to different people",
        next_step="keep both files: they are the proof",
    )


def round_is_out(body: StatementBody, now: datetime) -> bool | None:
    """Whether the round that a statement names is out; None if the scheme's rounds have no times."""
    due = scheme(body.scheme).time(body.round)
    return None if due is None else now >= due


def check_together(nights: list[Night], ledger: Ledger) -> None:
    """Each of several nights; Equivocation where two of them, or one and the ledger, cannot both be true."""
    for night in nights:
        _check_signed(night, ledger)  # before anyone is accused of having signed it
    check_one_history([night for night in nights if isinstance(night, Statement)])
    first_of: dict[str, Night] = {}
    for night in nights:
        check_night(night, ledger)
        check_same(first_of.setdefault(night.body.date, night), night)


def check_same(one: Night, other: Night) -> None:
    """Equivocation unless two of the trainer's words on one night are the same."""
    if one.body == other.body:
        return
    if isinstance(one, Statement) and isinstance(other, Statement):
        rounds = f"rounds {one.body.round} and {other.body.round}, {one.body.count} and {other.body.count} steps"
        raise Equivocation(
            f"the trainer signed two statements of {one.body.date}: {rounds}",
            cause="the trainer wants to choose between two draws",
            next_step="keep both files: they are the proof",
        )
    if isinstance(one, Missed) != isinstance(other, Missed):
        raise Equivocation(
            f"the trainer called the night of {one.body.date} missed, and signed its statement",
            cause="its draw was not to the trainer's liking",
            next_step="keep both files: they are the proof",
        )


def check_one_history(statements: list[Statement]) -> None:
    """Equivocation if two statements of one run name different heads after one step."""
    heads: dict[int, Statement] = {}
    for statement in statements:
        body = statement.body
        first = heads.setdefault(body.step, statement).body
        if first.head != body.head:
            where, there = f"the statement of {first.date}", f"that of {body.date}"
            raise equivocation(body.step, first.head, where, body.head, there)
