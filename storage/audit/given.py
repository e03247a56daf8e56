"""Records that a person names: each told for what it is, by its own check, then all of them beside each other.

certificate, dispute, statement, missed night, witness, draw, value of a beacon, opening, scores. Nothing is replayed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kernels import canonical
from storage import olmes
from storage.audit import certificate, dispute
from storage.audit.beacon import scheme
from storage.audit.certificate import Beacon, Body
from storage.audit.draw import parse_draw
from storage.audit.held_out import check_recorded
from storage.audit.opening import Opening
from storage.audit.statement import Night, Statement, check_together, parse_night
from storage.audit.witness import Witness, in_time, parse_witness
from storage.errors import CertificateFault, InputFault
from storage.ledger import Ledger
from storage.store import Store


@dataclass
class Given:
    """What was given. says: name of the file → what it is, in words; bodies: of its certificates, those in disputes
    included."""

    says: dict[str, str] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)
    nights: list[Night] = field(default_factory=list)
    witnesses: dict[str, Witness] = field(default_factory=dict)


def check_given(files: Iterable[tuple[str, bytes]], store: Store, ledger: Ledger) -> Given:
    """Check records, each with the name of its file, against the ledger of the release in `store`, and each other.

    Raises CertificateFault or InputFault for the first that is wrong, Equivocation for two histories.
    """
    given = Given()
    for where, data in files:
        try:
            given.says[where] = _checked(data, where, given, store, ledger)
        except CertificateFault as fault:
            text = fault.message.removeprefix("certificate: ").removeprefix(f"{where}: ")
            raise CertificateFault(f"{where}: {text}", cause=fault.cause, next_step=fault.next_step) from None
    check_together(given.nights, ledger)
    certificate.check_own(given.bodies)
    for where, witness in given.witnesses.items():
        given.says[where] += f"; {_worth(witness, given.nights, ledger)}"
    return given


def kind_of(data: bytes) -> str:
    """The kind of record that the bytes say they are; "" where they say none."""
    try:
        value = canonical.loads(data)
    except canonical.NotCanonical:
        return ""
    if not isinstance(value, dict):
        return ""
    if value.keys() == Beacon.model_fields.keys():
        return "beacon"
    body = value.get("body", value)
    kind = body.get("kind") if isinstance(body, dict) else ""
    return kind if isinstance(kind, str) else ""


def _checked(data: bytes, where: str, given: Given, store: Store, ledger: Ledger) -> str:
    match kind_of(data):
        case "draw":
            drawn = parse_draw(data, where, ledger)
            given.nights.append(drawn.statement)
            return f"draw of {drawn.date}: steps {', '.join(map(str, drawn.steps))}"
        case "statement" | "missed":
            night = parse_night(data, where)
            given.nights.append(night)
            return f"{night.body.kind} of {night.body.date}, by the run's trainer"
        case "witness":
            given.witnesses[where] = witness = parse_witness(data, where, ledger.run_id)
            said = witness.body
            return f"witness of statement {said.statement} of {said.date}, seen at {said.seen} by key {said.witness}"
        case "dispute":
            given.bodies.append(body := dispute.read(data, ledger).body.certificate.body)
            return f"dispute of step {body.step}, by key {body.auditor}: verbatim dispute judges it"
        case "evaluation":
            scores = olmes.parse(data, where, ledger)
            mean = f"{float(scores.mean()):.1%}, {scores.averaged()}"
            return f"scores of state {scores.step}, by key {scores.evaluator}: {mean}; nothing was asked again"
        case "opening":
            return _opening(data, where, ledger)
        case "beacon":
            return _value(Beacon.parse(data, where))
        case "certificate" | "":
            given.bodies.append(body := certificate.verify(data, ledger).body)
            check_recorded(store, ledger, body)
            return f"{body.piece} {body.verdict}, by key {body.auditor}"
        case other:
            raise CertificateFault(
                f"{where}: a record of kind {other[:40]!r} is none of an audit",
                cause="it is a part of a run, which is checked whole, or the record was edited",
                next_step="verbatim verify ADDRESS, without files",
            )


def _worth(witness: Witness, nights: list[Night], ledger: Ledger) -> str:
    """What a witness's word is worth beside the statements that were given."""
    if witness.body.witness == ledger.header.trainer:
        return "it is the trainer's own key, so it counts for nothing"
    seen = [night for night in nights if isinstance(night, Statement) and night.digest() == witness.body.statement]
    if not seen:
        return "give its statement too, to know whether it was in time"
    if scheme(seen[0].body.scheme).time(seen[0].body.round) is None:
        return "its round has no time: this shows only that it was not exchanged later"
    return "in its night, before its round" if in_time(witness, seen[0]) else "not in time: it counts for nothing"


def _opening(data: bytes, where: str, ledger: Ledger) -> str:
    opening = Opening.parse(data, where)
    for what, fits in (
        (f"run {opening.run}, expected run {ledger.run_id}", opening.run == ledger.run_id),
        (f"step {opening.step}, the ledger holds {len(ledger)} steps", opening.step < len(ledger)),
    ):
        if not fits:
            raise InputFault(
                f"{where}: it is of {what}",
                cause="it was made for another run, or edited",
                next_step="give it beside the release of its own run",
            )
    unit = "its states and gradient are proven where they lie, by verbatim verify ADDRESS"
    return f"opening of step {opening.step}, for the draw of {opening.draw.date}; {unit}"


def _value(beacon: Beacon) -> str:
    known = scheme(beacon.scheme).time(beacon.round)
    what = f"value of round {beacon.round} of {beacon.scheme}"
    if known is None:
        return f"{what}: nobody vouches for it, or for when"
    return f"{what}, which came out at {known}: the signature that proves it is in a draw"
