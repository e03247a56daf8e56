"""Beacons: public random values by round, which nobody knew before. SCHEMES is the one place that knows them.

file        someone wrote a value down; nobody else vouches for it, or for when. For use without a network
quicknet    drand's, whose every round is signed by a group and comes out at a known time (drand.py)
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from storage.audit import drand
from storage.audit.certificate import Beacon
from storage.errors import InputFault, Refused, UsageError
from storage.named import read_file
from storage.store import Store

OWN = "own"  # the address of values drawn on this machine
LEAD = timedelta(minutes=15)  # for a witness, between the statement and its round
MAX_BEACON = 1 << 12


@dataclass(frozen=True)
class Value:
    """A round's value with its evidence: for quicknet the group's signature, for a file nothing."""

    beacon: Beacon
    evidence: str


class Source(Protocol):
    """Where the values of one scheme come from."""

    @property
    def scheme(self) -> str:
        """A key of SCHEMES."""

    def coming(self, now: datetime) -> int:
        """The round that a statement made now is to name: LEAD to come, where rounds have times."""

    def fetch(self, number: int) -> Value:
        """The value of a round; Refused or MissingObject if the source has no such round (yet). Not checked."""


@dataclass(frozen=True)
class Scheme:
    """What can be said of a scheme's values without its source.

    time: when a round comes out, None if nobody knows. prepare: is given many values before each of them is checked.
    """

    check: Callable[[Value], None]
    time: Callable[[int], datetime | None]
    prepare: Callable[[list[Value]], None] = lambda values: None


def _check_file(value: Value) -> None:
    if value.evidence:
        raise InputFault("a file's beacon has no evidence, but the record shows some")


def _check_quicknet(value: Value) -> None:
    drand.check(value.beacon.round, value.evidence)
    beacon, value_due = value.beacon, drand.value_of(value.evidence)
    if beacon.value != value_due:
        raise InputFault(f"round {beacon.round} of quicknet has value {value_due}, the record says {beacon.value}")


def _prepare_quicknet(values: list[Value]) -> None:
    drand.check_together((value.beacon.round, value.evidence) for value in values)


SCHEMES = {
    "file": Scheme(_check_file, lambda number: None),
    "quicknet": Scheme(_check_quicknet, drand.time_of, _prepare_quicknet),
}


def scheme(name: str) -> Scheme:
    """The scheme of this name; InputFault if it is not known here."""
    if name not in SCHEMES:
        raise InputFault(f"no beacon scheme is called {name[:40]!r}: known are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def check_value(value: Value) -> None:
    """InputFault unless the scheme's evidence shows that this is its value of this round."""
    scheme(value.beacon.scheme).check(value)


def prepare(values: list[Value]) -> None:
    """Make the checks of many values faster; what is wrong with one of them, check_value() says."""
    for name, known in SCHEMES.items():
        known.prepare([value for value in values if value.beacon.scheme == name])


def open_source(address: str, records: Store) -> Source:
    """The source at an address: a drand server (http://, https://), a file, or OWN."""
    if address.startswith(("http://", "https://")):
        return Quicknet(address)
    return Own(records) if address == OWN else FileBeacon(Path(address))


@dataclass(frozen=True)
class Quicknet:
    """A drand server."""

    address: str
    scheme: str = "quicknet"

    def coming(self, now: datetime) -> int:
        return drand.round_from(now + LEAD)

    def fetch(self, number: int) -> Value:
        signature = drand.fetch(self.address, number)
        return Value(Beacon(scheme=self.scheme, round=number, value=drand.value_of(signature)), signature)


class FileBeacon:
    """One value in a file: canonical JSON {"round":…,"scheme":"file","value":"64 hex digits"}, a newline allowed."""

    scheme = "file"

    def __init__(self, path: Path) -> None:
        self._path, self._beacon = path, read_beacon(path)

    def coming(self, now: datetime) -> int:
        return self._beacon.round

    def fetch(self, number: int) -> Value:
        if number != self._beacon.round:
            raise Refused(
                f"{self._path} holds round {self._beacon.round}, the statement names round {number}",
                cause="the file was exchanged after the statement was made",
                next_step=f"give the file with round {number}",
            )
        return Value(self._beacon, "")


class Own:
    """Values of this machine, each kept under its night, whose date is the round, so that it is drawn once."""

    scheme = "file"

    def __init__(self, records: Store) -> None:
        self._records = records

    def coming(self, now: datetime) -> int:
        return int(f"{now:%Y%m%d}")

    def fetch(self, number: int) -> Value:
        try:
            day = datetime.strptime(str(number), "%Y%m%d").date()
        except ValueError:
            raise Refused(f"round {number} is no date, so its value was not drawn on this machine") from None
        key = f"beacons/{day}.json"
        self._records.create(key, Beacon(scheme=self.scheme, round=number, value=os.urandom(32).hex()).canonical())
        return Value(Beacon.parse(self._records.read(key, limit=MAX_BEACON), key), "")


def read_beacon(path: Path) -> Beacon:
    """The value of a beacon's file. UsageError if it cannot be read, InputFault if it holds something else."""
    try:
        data = read_file(path, MAX_BEACON)
    except OSError as error:
        raise UsageError(
            f"the beacon file {path} cannot be read: {error.strerror}",
            next_step='write {"round":1,"scheme":"file","value":"<64 hex digits>"} into it',
        ) from None
    beacon = Beacon.parse(data.removesuffix(b"\n"), str(path))
    if beacon.scheme != FileBeacon.scheme:
        raise InputFault(f"{path} claims a value of {beacon.scheme}, but a file alone shows no evidence of it")
    return beacon
