"""A draw in one call: the trainer's statement of a night, and a file's value."""

from datetime import UTC, datetime

from storage.audit.beacon import Value
from storage.audit.certificate import Beacon
from storage.audit.draw import Draw
from storage.audit.keys import Key
from storage.audit.settle import draw_once
from storage.audit.statement import Statement, announce
from storage.ledger import Ledger
from storage.store import Store

BEACON = Beacon(scheme="file", round=7, value="ab" * 32)


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
