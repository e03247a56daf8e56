"""Draws: which steps are audited on a date, decided by a public random value that nobody chose.

    draws/<run>/<date>.json    statement, beacon, evidence, steps; written once, before the audits start

A draw follows from the statement of its night and from the value of the round that this names: there is nothing left
to choose. Whether the statement came before the value is what witnesses say (statement.py).
"""

from collections.abc import Iterator
from datetime import datetime
from itertools import count
from typing import Literal

from kernels import canonical
from kernels.digest import digest
from storage.audit.beacon import Value, check_value, scheme
from storage.audit.certificate import Beacon, DrawReference
from storage.audit.statement import Statement, StatementBody, check_date, check_night, round_is_out
from storage.errors import InputFault, Refused
from storage.ledger import Ledger
from storage.records import Count, Digest, Record, Text
from storage.store import Readable, Store

MAX_DRAW = 1 << 20


class Draw(Record):
    """One date's draw: the steps that follow from the statement and the beacon's value."""

    kind: Literal["draw"] = "draw"
    statement: Statement
    beacon: Beacon
    evidence: Text
    steps: list[Count]

    @property
    def body(self) -> StatementBody:
        """What the trainer stated: head, date, steps to draw from."""
        return self.statement.body

    @property
    def run(self) -> Digest:
        """The run's id."""
        return self.body.run

    @property
    def date(self) -> str:
        """The night of the draw."""
        return self.body.date

    def digest(self) -> str:
        """What a certificate names."""
        return digest(self.canonical(), "draw")

    def reference(self) -> DrawReference:
        """How a certificate names it."""
        return DrawReference(date=self.date, record=self.digest())


def draw_key(run: str, date: str) -> str:
    """Where the draw of a run and date lies: one folder of records serves every run that its owner audits."""
    return f"draws/{run[:16]}/{date}.json"


def make_draw(records: Store, ledger: Ledger, statement: Statement, value: Value, now: datetime) -> Draw:
    """The draw of the statement's night: recorded now, or the one that was recorded first.

    Raises Refused for another round than the statement names, or where it is not out; InputFault for a value that is
    not the beacon's.
    """
    check_night(statement, ledger)
    body, beacon = statement.body, value.beacon
    if (beacon.scheme, beacon.round) != (body.scheme, body.round):
        raise Refused(
            f"round {beacon.round} of {beacon.scheme} cannot draw for {body.date}: its statement names round "
            f"{body.round} of {body.scheme}",
            cause="another round's value was given: an earlier one was known when the statement was made",
        )
    if round_is_out(body, now) is False:
        due = scheme(body.scheme).time(body.round)
        raise Refused(f"round {body.round} of {body.scheme} comes out at {due}, it is {now}", cause="a wrong clock")
    check_value(value)
    steps = chosen(body.run, body.head, body.date, beacon, body.step, body.count)
    draw = Draw(statement=statement, beacon=beacon, evidence=value.evidence, steps=steps)
    records.create(draw_key(ledger.run_id, body.date), draw.canonical())
    return load_draw(records, ledger, body.date)  # of two that raced, the first stands


def load_draw(records: Readable, ledger: Ledger, date: str, base: str = "") -> Draw:
    """The recorded draw of a date, checked; MissingObject if there is none.

    base: the key prefix below which the records lie: "", or "audits/" in a release.
    """
    check_date(date)
    key = base + draw_key(ledger.run_id, date)
    draw = parse_draw(records.read(key, limit=MAX_DRAW), key, ledger)
    if draw.date != date:
        raise InputFault(f"{key} is a draw of {draw.date}", cause="the record was renamed")
    return draw


def parse_draw(data: bytes, where: str, ledger: Ledger) -> Draw:
    """The draw of these bytes; InputFault unless it follows from a statement of this run and its round's value."""
    draw = Draw.parse(data, where)
    body, beacon = draw.body, draw.beacon
    check_night(draw.statement, ledger)
    if (beacon.scheme, beacon.round) != (body.scheme, body.round):
        raise InputFault(
            f"{where}: drawn by round {beacon.round} of {beacon.scheme}, but its statement names round {body.round} of "
            f"{body.scheme}",
            cause="the trainer chose the round after its value was known",
        )
    check_value(Value(beacon, draw.evidence))
    if draw.steps != chosen(body.run, body.head, body.date, beacon, body.step, body.count):
        raise InputFault(f"{where}: its steps do not follow from head and beacon", cause="the record was edited")
    return draw


def chosen(run: str, head: str, date: str, beacon: Beacon, among: int, wanted: int) -> list[int]:
    """`wanted` different steps below `among`, each equally likely, in increasing order."""
    found: set[int] = set()
    numbers = _uniform(run, head, date, beacon, among)
    while len(found) < wanted:
        found.add(next(numbers))
    return sorted(found)


def _uniform(run: str, head: str, date: str, beacon: Beacon, below: int) -> Iterator[int]:
    """Numbers 0 … below − 1 from a digest in counter mode; a word beyond the last whole multiple is passed over."""
    named = {"beacon": beacon.document(), "counter": 0, "date": date, "head": head, "run": run}
    before, after = canonical.dumps(named).split(b'"counter":0')  # the rest is the same for each of them
    limit = 2**64 - 2**64 % below
    for counter in count():
        word = int(digest(b'%b"counter":%d%b' % (before, counter, after), "draw steps")[:16], 16)
        if word < limit:
            yield word % below
