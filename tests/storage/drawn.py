"""What draws need of a run, without training one: a ledger, keys, records, certificates that verify; and beacons."""

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import kernels
from kernels.digest import digest
from model.spec import RunSpec
from storage.audit import dispute
from storage.audit.beacon import LEAD, SCHEMES, Scheme, Value
from storage.audit.certificate import Beacon, Body, Certificate, save_certificate, sign
from storage.audit.dispute import Claim, Dispute
from storage.audit.draw import Draw
from storage.audit.keys import Key, load_or_create_key
from storage.audit.settle import draw_once
from storage.audit.statement import PURPOSE, Statement, announce
from storage.errors import InputFault
from storage.ledger import Entry, Header, Ledger, create_header
from storage.provenance import Provenance
from storage.store import LocalStore, Store
from tests.storage.small import spec

BEACON = Beacon(scheme="file", round=7, value="ab" * 32)
DATE = "2026-11-29"


def at(date: str, clock: str = "03:00:00") -> datetime:
    """A moment of a date, UTC."""
    return datetime.fromisoformat(f"{date}T{clock}").replace(tzinfo=UTC)


class Book:
    """A ledger of made-up entries, its trainer, a folder of records, and as many other people as are asked for.

    of: the run's spec, that of small.py without.
    """

    def __init__(self, folder: Path, steps: int = 12, name: str = "a run", of: RunSpec | None = None) -> None:
        self.folder, self.published, self.records = folder, LocalStore(folder / name), LocalStore(folder / "records")
        self.trainer = self.key(f"trainer-of-{name.replace(' ', '-')}")
        create_header(self.published, _header(self.trainer.public, of or spec()))
        self.ledger = Ledger(self.published)
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        """Record entries up to this number."""
        while len(self.ledger) < steps:
            self.ledger.record(_entry(len(self.ledger), self.ledger.head))

    def key(self, name: str) -> Key:
        """A person's key."""
        return load_or_create_key(self.folder / "people", name)

    def named(self, *names: str) -> dict[str, str]:
        """The keys that a reader counts, each under its own name."""
        return {self.key(name).public: name for name in names}

    def state(
        self, date: str = DATE, count: int = 2, beacon: Beacon = BEACON, records: Store | None = None
    ) -> Statement:
        """The trainer's statement of a night that a file's value is to draw."""
        night = announce(records or self.records, self.ledger, self.trainer, date, count, Known(beacon), at(date))
        assert isinstance(night, Statement)
        return night

    def draw(self, date: str = DATE, count: int = 2, beacon: Beacon = BEACON, records: Store | None = None) -> Draw:
        """The draw of a night by a file's value; another's, if one was recorded before."""
        statement = self.state(date, count, beacon, records)
        return draw_once(records or self.records, self.ledger, statement, Known(beacon), at(date))

    def certify(self, name: str, step: int, backend: str = "cpu", first: int | None = None, **changes: Any) -> Body:
        """A certificate in the records that verifies, by a person who says that the step matches."""
        body = Body(
            run=self.ledger.run_id,
            piece=f"step {step}",
            verdict="match",
            first_step=step if first is None else first,
            step=step,
            predecessor=self.ledger.link(step),
            recorded=self.ledger[step].digest(),
            reproduced=self.ledger[step],
            mix_root=self.ledger.header.mix_root,
            provenance=provenance(backend),
            beacon=None,
            draw=None,
            began="2026-11-29T03:00:00Z",
            ended="2026-11-29T03:01:00Z",
            proof=secrets.token_hex(32),
            auditor=self.key(name).public,
        ).model_copy(update=changes)
        save_certificate(self.records, sign(body, self.key(name)))
        return body


def disputed(certificate: bytes, key: Key, signer: Key | None = None) -> bytes:
    """A dispute over a certificate of a no-match, its trace empty; signer: whoever signs in the accuser's place."""
    claim = Claim(
        certificate=Certificate.parse(certificate, "certificate"),
        place=None,
        contradicted="",
        agreed="reference",
        operations=[],
    )
    return Dispute(body=claim, signature=(signer or key).sign(claim.canonical(), dispute.PURPOSE)).canonical()


def resigned(statement: Statement, key: Key, **changes: object) -> Statement:
    """The statement with other fields, properly signed."""
    body = statement.body.model_copy(update=changes)
    return Statement(body=body, signature=key.sign(body.canonical(), PURPOSE))


def _header(trainer: str, of: RunSpec) -> Header:
    roots = {
        name: digest(name.encode(), "test") for name in ("mix_root", "held_out_root", "initial_root", "code", "lock")
    }
    return Header(spec=of.canonical(), trainer=trainer, **roots)


def _entry(step: int, previous: str) -> Entry:
    one, state = "3f800000", digest(step.to_bytes(8, "big"), "test")
    return Entry(
        step=step,
        tokens=32 * (step + 1),
        first_window=2 * step,
        windows=2,
        lr=one,
        loss=one,
        z_loss=one,
        grad_norm=one,
        batch=state,
        gradient=state,
        state=state,
        event="",
        clipped=False,
        previous=previous,
    )


def provenance(backend: str) -> Provenance:
    return Provenance(
        backend=backend,
        details={},
        device="a machine",
        threads=1,
        system="a system",
        versions={},
        code="0" * 64,
        lock="0" * 64,
        contract=kernels.CONTRACT,
        conformance=kernels.vectors_digest(),
    )


class Known:
    """A source with one value."""

    scheme = "file"

    def __init__(self, beacon: Beacon = BEACON) -> None:
        self._beacon = beacon

    def coming(self, now: datetime) -> int:
        return self._beacon.round

    def fetch(self, number: int) -> Value:
        return Value(self._beacon, "")


class Hourly:
    """A source whose rounds come out every hour, each with a value that anyone can check; see hourly()."""

    scheme = "hourly"

    def coming(self, now: datetime) -> int:
        return int((now + LEAD).timestamp()) // 3600 + 1

    def fetch(self, number: int) -> Value:
        return Value(Beacon(scheme=self.scheme, round=number, value=_of_hour(number)), "")


def hourly(patch: pytest.MonkeyPatch) -> Hourly:
    """Make the scheme known for one test."""

    def check(value: Value) -> None:
        if value.beacon.value != _of_hour(value.beacon.round):
            raise InputFault("not the value of this hour")

    patch.setitem(SCHEMES, Hourly.scheme, Scheme(check, lambda number: datetime.fromtimestamp(number * 3600, UTC)))
    return Hourly()


def _of_hour(number: int) -> str:
    return digest(number.to_bytes(8, "big"), "hourly")
