"""A draw in one call: the trainer's statement of a night, and a file's value."""

from datetime import UTC, datetime

import pytest

from kernels.digest import digest
from storage.audit.beacon import LEAD, SCHEMES, Scheme, Value
from storage.audit.certificate import Beacon
from storage.audit.draw import Draw
from storage.audit.keys import Key
from storage.audit.settle import draw_once
from storage.audit.statement import Statement, announce
from storage.errors import InputFault
from storage.ledger import Ledger
from storage.store import Store

BEACON = Beacon(scheme="file", round=7, value="ab" * 32)


class Hourly:
    """A source whose rounds come out every hour, each with a value that anyone can check; see hourly()."""

    scheme = "hourly"

    def coming(self, now: datetime) -> int:
        return int((now + LEAD).timestamp()) // 3600 + 1

    def fetch(self, number: int) -> Value:
        return Value(Beacon(scheme=self.scheme, round=number, value=_hourly(number)), "")


def hourly(patch: pytest.MonkeyPatch) -> Hourly:
    """Make the scheme known for one test."""

    def check(value: Value) -> None:
        if value.beacon.value != _hourly(value.beacon.round):
            raise InputFault("not the value of this hour")

    due = Scheme(check, lambda number: datetime.fromtimestamp(number * 3600, UTC))
    patch.setitem(SCHEMES, Hourly.scheme, due)
    return Hourly()


def _hourly(number: int) -> str:
    return digest(number.to_bytes(8, "big"), "hourly")


class Known:
    """A source with one value."""

    scheme = "file"

    def __init__(self, beacon: Beacon = BEACON) -> None:
        self._beacon = beacon

    def coming(self, now: datetime) -> int:
        return self._beacon.round

    def fetch(self, number: int) -> Value:
        return Value(self._beacon, "")


def at(date: str, clock: str = "03:00:00") -> datetime:
    """A moment of a date, UTC."""
    return datetime.fromisoformat(f"{date}T{clock}").replace(tzinfo=UTC)


def stated(records: Store, ledger: Ledger, key: Key, date: str, count: int = 2, beacon: Beacon = BEACON) -> Statement:
    """The trainer's statement of a night."""
    night = announce(records, ledger, key, date, count, Known(beacon), at(date))
    assert isinstance(night, Statement)
    return night


def drawn(records: Store, ledger: Ledger, key: Key, date: str, count: int = 2, beacon: Beacon = BEACON) -> Draw:
    """The draw of a night by a file's value; another's, if one was recorded before."""
    statement = stated(records, ledger, key, date, count, beacon)
    return draw_once(records, ledger, statement, Known(beacon), at(date))
