"""Witnesses: other keys that say they saw a head statement, and when, before its round was out.

    witnesses/<run>/<date>-<key>.json    digest of the statement, time, the witness's signature

A witness refuses a statement whose round is out, so a head that was ground after the beacon finds none; and it keeps
what it saw, so a statement that is exchanged, or dropped for a bad draw, is known to two.
"""

from datetime import UTC, datetime
from typing import Literal

from storage.audit.beacon import scheme
from storage.audit.keys import Key, verify_signature
from storage.audit.statement import (
    FORM,
    MAX_STATEMENT,
    Statement,
    begins,
    check_night,
    check_one_history,
    check_same,
    first,
    round_is_out,
)
from storage.errors import InputFault, Refused
from storage.ledger import Ledger
from storage.records import Digest, Record, Signature, Text
from storage.store import Store

PURPOSE = "witness"


class WitnessBody(Record):
    """That `witness` saw the statement with this digest at the time `seen`, by its own clock."""

    kind: Literal["witness"] = "witness"
    run: Digest
    date: Text
    statement: Digest
    seen: Text
    witness: Digest


class Witness(Record):
    """A witness's word, signed by it."""

    body: WitnessBody
    signature: Signature


def witness_key(run: str, date: str, key: str) -> str:
    """Where a witness's word on a night lies: one key sees one statement a night."""
    return f"witnesses/{run[:16]}/{date}-{key[:16]}.json"


def bear_witness(records: Store, ledger: Ledger, key: Key, statement: Statement, now: datetime) -> Witness:
    """Sign that this key saw the statement now, and keep both in `records`, the witness's own or the trainer's.

    Raises Refused where the night has not begun, the round is out, or the key is the trainer's; Equivocation where the
    witness holds another statement of that night or of that step.
    """
    check_night(statement, ledger)
    body = statement.body
    if key.public == ledger.header.trainer:
        raise Refused("a trainer cannot be its own witness", next_step="ask another person to witness")
    if now < begins(body.date):
        raise Refused(
            f"the night of {body.date} has not begun: it is {now}",
            cause="the trainer's clock is ahead, or yours behind; or nights are stated before the steps that they miss",
            next_step="set the clock, or witness the statement in its night",
        )
    if round_is_out(body, now):
        raise Refused(
            f"round {body.round} of {body.scheme} came out at {scheme(body.scheme).time(body.round)}, it is {now}: "
            f"the statement of {body.date} may have been made after it",
            cause="the witness came too late, or the statement did",
            next_step="witness the next night's statement in time",
        )
    _keep(records, ledger, statement)
    said = WitnessBody(
        run=body.run,
        date=body.date,
        statement=statement.digest(),
        seen=now.astimezone(UTC).strftime(FORM),
        witness=key.public,
    )
    place = witness_key(body.run, body.date, key.public)
    records.create(place, Witness(body=said, signature=key.sign(said.canonical(), PURPOSE)).canonical())
    return _recorded(records, place, said)


def _recorded(records: Store, place: str, said: WitnessBody) -> Witness:
    """The word that lies there, of now or of before; InputFault if it is of something else than `said`."""
    witness = parse_witness(records.read(place, limit=MAX_STATEMENT), place, said.run)
    if (found := witness.body.model_copy(update={"seen": said.seen})) != said:
        raise InputFault(
            f"{place} is of statement {found.statement} of {found.date[:40]!r}, by key {found.witness}; expected "
            f"statement {said.statement} of {said.date}, by key {said.witness}",
            cause="another put a record there before this key could",
            next_step="keep your records in a folder of your own: --records",
        )
    return witness


def _keep(records: Store, ledger: Ledger, statement: Statement) -> None:
    """Keep the statement beside what this witness saw before, or say what contradicts it."""
    night = first(records, ledger, statement)
    check_one_history([night, statement] if isinstance(night, Statement) else [])
    check_same(night, statement)


def parse_witness(data: bytes, where: str, run: str) -> Witness:
    """A witness's word on a night of this run, its signature checked; InputFault."""
    witness = Witness.parse(data, where)
    if witness.body.run != run:
        raise InputFault(f"{where}: it is of run {witness.body.run}, not of run {run}")
    if not verify_signature(witness.body.witness, witness.signature, witness.body.canonical(), PURPOSE):
        raise InputFault(f"{where}: the signature is not that of the witness {witness.body.witness}")
    seen_at(witness)
    return witness


def seen_at(witness: Witness) -> datetime:
    """When the witness saw the statement."""
    try:
        return datetime.strptime(witness.body.seen, FORM).replace(tzinfo=UTC)
    except ValueError:
        raise InputFault(f"a witness saw a statement at {witness.body.seen[:40]!r}, which is no time") from None


def in_time(witness: Witness, statement: Statement) -> bool:
    """Whether the witness saw this statement in its night, before its round; never for a scheme whose rounds have no
    times."""
    body, seen = statement.body, seen_at(witness)
    due = scheme(body.scheme).time(body.round)
    return due is not None and begins(body.date) <= seen < due and witness.body.statement == statement.digest()
