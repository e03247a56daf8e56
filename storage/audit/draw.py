"""Draws: which steps are audited on a date, decided by a public random value that nobody chose.

    draws/<run>/<date>.json    run, head, beacon, steps; written once, before the audits start

With a file beacon and without a witness, that the value was not chosen after the fact is the trainer's word, and the
record says so.
"""

from collections.abc import Iterator
from datetime import date as calendar_date
from pathlib import Path
from typing import Literal

from kernels import canonical
from kernels.digest import digest
from storage.audit.certificate import Beacon, DrawReference
from storage.errors import InputFault, MissingObject, Refused, UsageError
from storage.ledger import Ledger
from storage.named import read_file
from storage.records import Count, Digest, Record, Text
from storage.store import Store

MAX_DRAW = 1 << 20
MAX_BEACON = 1 << 12


class Draw(Record):
    """One date's draw from the steps 0 … among − 1. basis: on whose word it rests."""

    kind: Literal["draw"] = "draw"
    run: Digest
    date: Text
    head: Digest
    among: Count
    count: Count
    beacon: Beacon
    basis: Literal["trainer's word"]
    steps: list[Count]

    def digest(self) -> str:
        """What a certificate names."""
        return digest(self.canonical(), "draw")

    def reference(self) -> DrawReference:
        """How a certificate names it."""
        return DrawReference(date=self.date, record=self.digest())


def draw_key(run: str, date: str) -> str:
    """Where the draw of a run and date lies: one folder of records serves every run that its owner audits."""
    return f"draws/{run[:16]}/{date}.json"


def read_beacon(path: Path) -> Beacon:
    """The file beacon: canonical JSON {"round":…,"scheme":"file","value":"64 hex digits"}, a final newline allowed."""
    try:
        data = read_file(path, MAX_BEACON)
    except OSError as error:
        raise UsageError(
            f"the beacon file {path} cannot be read: {error.strerror}",
            next_step='write {"round":1,"scheme":"file","value":"<64 hex digits>"} into it',
        ) from None
    return Beacon.parse(data.removesuffix(b"\n"), str(path))


def make_draw(records: Store, ledger: Ledger, date: str, beacon: Beacon, count: int) -> Draw:
    """The draw of `date` ("2026-11-29"): recorded now, or the one that was recorded first.

    One date has one draw of a run, whoever asks and however often; the recorded one is checked before it is returned.
    Raises Refused where there is nothing to draw from.
    """
    _check_date(date)
    if count < 1:
        raise UsageError(f"a draw of {count} steps; at least 1 is needed")
    try:
        return load_draw(records, ledger, date)
    except MissingObject:
        pass
    if not len(ledger):
        raise Refused("the ledger has no steps: there is nothing to draw from")
    steps = chosen(ledger.run_id, ledger.head, date, beacon, len(ledger), min(count, len(ledger)))
    draw = Draw(
        run=ledger.run_id,
        date=date,
        head=ledger.head,
        among=len(ledger),
        count=len(steps),
        beacon=beacon,
        basis="trainer's word",
        steps=steps,
    )
    records.create(draw_key(ledger.run_id, date), draw.canonical())
    return load_draw(records, ledger, date)  # of two that raced, the first stands


def load_draw(records: Store, ledger: Ledger, date: str, base: str = "") -> Draw:
    """The recorded draw of a date; InputFault unless it is of this run and its steps follow from head and beacon.

    base: the key prefix below which the records lie: "", or "audits/" in a release.
    """
    _check_date(date)
    key = base + draw_key(ledger.run_id, date)
    draw = Draw.parse(records.read(key, limit=MAX_DRAW), key)
    if draw.run != ledger.run_id or draw.date != date or draw.among > len(ledger) or not draw.count <= draw.among:
        raise InputFault(f"{key} is a draw of {draw.date} among {draw.among} steps of run {draw.run}, not of this run")
    if draw.head != ledger.link(draw.among):
        raise InputFault(f"{key}: after {draw.among} steps it saw head {draw.head}, the ledger has another there")
    if draw.steps != chosen(draw.run, draw.head, date, draw.beacon, draw.among, draw.count):
        raise InputFault(f"{key}: its steps do not follow from head and beacon", cause="the record was edited")
    return draw


def chosen(run: str, head: str, date: str, beacon: Beacon, among: int, count: int) -> list[int]:
    """`count` different steps below `among`, each equally likely, in increasing order."""
    found: set[int] = set()
    numbers = _uniform(run, head, date, beacon, among)
    while len(found) < count:
        found.add(next(numbers))
    return sorted(found)


def _uniform(run: str, head: str, date: str, beacon: Beacon, below: int) -> Iterator[int]:
    """Numbers 0 … below − 1 from a digest in counter mode; a word beyond the last whole multiple is passed over."""
    named = {"beacon": beacon.document(), "date": date, "head": head, "run": run}
    limit = 2**64 - 2**64 % below
    counter = 0
    while True:
        word = int(digest(canonical.dumps(named | {"counter": counter}), "draw steps")[:16], 16)
        counter += 1
        if word < limit:
            yield word % below


def _check_date(date: str) -> None:
    try:
        valid = calendar_date.fromisoformat(date).isoformat() == date
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{date!r} is not a date", next_step="write it as 2026-11-29")
