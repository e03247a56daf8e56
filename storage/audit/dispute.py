"""Disputes: a no-match in a file that a third person re-runs in one command, to learn who is right.

    {"body": {certificate, place, contradicted, agreed, operations}, "signature": "…"}    signed by the accuser

`operations` is the trace of the disputed step. Whoever judges replays the step from the published run, traced too:

    the ledger's entry comes out     the ledger is right, and the accuser's first operation that differs is named
    the accuser's comes out          the accuser is right
    a third one comes out            neither, and no-match stands: the ledger's entry was not reproduced

Where the judge and the accuser part, the reference does that one operation again with the same inputs. If it does not
side with the judge, the judge's own machine is at fault, and nothing is said of the others.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from kernels.traced import Operation, first_difference
from storage import engine
from storage.audit.certificate import Certificate
from storage.audit.certificate import verify as verify_certificate
from storage.audit.confirm import CAUSE
from storage.audit.keys import Key, verify_signature
from storage.audit.narrow import Place, Watch, trace_again
from storage.audit.replay import audit_step
from storage.audit.verdict import AuditProgress, Outcome, Report, Verdict
from storage.errors import CertificateFault, MachineFault, UsageError
from storage.ledger import Entry, Ledger
from storage.memory import plan_for
from storage.records import Count, Digest, Record, Signature, Text
from storage.store import Store, object_digest

MAX_DISPUTE = 64 << 20
PURPOSE = "dispute"
Right = Literal["ledger", "accuser", "neither", ""]


class Done(Record):
    """One operation of the accuser's trace: kernels.traced.Operation."""

    unit: Count | None
    name: Text
    about: Text
    inputs: Digest
    outputs: Digest

    def operation(self) -> Operation:
        """The same, for comparing."""
        return Operation(self.unit, self.name, self.about, self.inputs, self.outputs)


class Claim(Record):
    """What is disputed. agreed: the second backend of the accuser, whose trace was the same."""

    kind: Literal["dispute"] = "dispute"
    certificate: Certificate
    place: Place | None
    contradicted: Text
    agreed: Text
    operations: list[Done]


class Dispute(Record):
    """A claim and the accuser's signature of it."""

    body: Claim
    signature: Signature


@dataclass(frozen=True)
class Judgement:
    """Who is right, "" where the judge's own replay came to no statement about the step.

    verdict: of the judge's audit of the step. differs: the first operation in which judge and accuser part, "" for
    none. place, contradicted: what the judge's replay holds against the ledger.
    """

    verdict: Verdict
    right: Right
    accuser: str
    differs: str
    place: Place | None
    contradicted: str

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return self.verdict.document() | {
            "right": self.right,
            "accuser": self.accuser,
            "differs": self.differs,
            "place": self.place.document() if self.place else None,
            "contradicted": self.contradicted,
        }


def accuse(
    store: Store, step: int, backend: str, second: str, key: Key, report: Report = lambda progress: None
) -> tuple[Verdict, bytes | None]:
    """(the verdict on a step, the dispute file of a no-match that two backends of this machine agree on).

    No file where the step matches, or where the cheap checks find the fault, which anyone repeats without a replay.
    If a step on the way does not match, that is the one disputed.
    """
    if backend == second:
        raise UsageError(f"a second backend is needed beside {backend}", next_step="--second reference, or another")
    watch = Watch(keep=True)
    verdict = audit_step(store, step, backend, key, report=report, witness=watch)
    if verdict.outcome is not Outcome.NO_MATCH or verdict.certificate is None:
        return verdict, None
    if verdict.differs_at is not None and verdict.differs_at != step:
        return accuse(store, verdict.differs_at, backend, second, key, report)
    try:
        report(AuditProgress(f"replay by {second}", step, 0, 1, None))
        _check_second(watch, backend, second)
    except MachineFault as error:
        return replace(verdict, outcome=Outcome.MACHINE_FAULT, detail=str(error), certificate=None), None
    claim = Claim(
        certificate=Certificate.parse(verdict.certificate, "certificate"),
        place=watch.place,
        contradicted=watch.contradicted,
        agreed=second,
        operations=[Done(**operation._asdict()) for operation in watch.operations],
    )
    return verdict, Dispute(body=claim, signature=key.sign(claim.canonical(), PURPOSE)).canonical()


def _check_second(watch: Watch, first: str, second: str) -> None:
    """MachineFault unless the second backend comes to the same entry by the same operations."""
    assert watch.run and watch.state
    engine.self_test(second)
    backend = engine.load_backend(second)
    memory = plan_for(watch.run.spec, "step", backend.device_memory())
    entry, operations = trace_again(watch.run, backend, watch.state, memory)
    difference = first_difference(watch.operations, operations)
    if difference or entry != watch.entry:
        raise MachineFault(
            f"backends {first} and {second} disagree on this machine about step {entry.step}: they part at "
            f"{difference or 'its entry'}",
            cause=f"{CAUSE}, or a fault in one of the backends",
            next_step="verbatim doctor with each backend; this machine says nothing about the run",
        )


def read(data: bytes, ledger: Ledger) -> Dispute:
    """The dispute, proven genuine and of this ledger; CertificateFault says what is wrong."""
    if len(data) > MAX_DISPUTE:
        raise CertificateFault(f"dispute: {len(data)} bytes, at most {MAX_DISPUTE} are allowed")
    dispute = Dispute.parse(data, "dispute", CertificateFault)
    certificate = dispute.body.certificate
    if not verify_signature(certificate.body.auditor, dispute.signature, dispute.body.canonical(), PURPOSE):
        raise CertificateFault(
            f"dispute: the signature is not that of key {certificate.body.auditor} over this content",
            cause="a byte was changed, or the certificate is another's",
            next_step="get it again from the accuser",
        )
    verify_certificate(certificate.canonical(), ledger)
    if certificate.body.verdict != "no-match" or certificate.body.step is None:
        raise CertificateFault(
            f"dispute: its certificate says {certificate.body.verdict} of {certificate.body.piece}",
            cause="only a step that did not match is disputed",
        )
    return dispute


def judge(store: Store, data: bytes, backend: str, key: Key, report: Report = lambda progress: None) -> Judgement:
    """Replay the disputed step and say who is right. CertificateFault where the file is not a dispute of this run."""
    dispute = read(data, Ledger(store))
    body, theirs = dispute.body.certificate.body, [done.operation() for done in dispute.body.operations]
    assert body.step is not None
    watch = Watch(other=theirs)
    verdict = audit_step(store, body.step, backend, key, report=report, witness=watch)
    difference = first_difference(watch.operations, theirs) if watch.operations else None
    if difference and difference.computed and difference.ours:
        if watch.by_referee(difference.ours) != difference.ours.outputs:
            fault = MachineFault(
                f"the reference gives another result than backend {backend} of {difference}, with the same inputs",
                cause=f"{CAUSE}, or a fault in the backend",
                next_step="verbatim doctor; judge the dispute by another backend or on another machine",
            )
            verdict = replace(verdict, outcome=Outcome.MACHINE_FAULT, detail=str(fault), certificate=None)
    return Judgement(
        verdict,
        _right(verdict, watch.entry, body.reproduced),
        body.auditor,
        str(difference or ""),
        watch.place,
        watch.contradicted,
    )


def _right(verdict: Verdict, found: Entry | None, accused: object) -> Right:
    if verdict.outcome is Outcome.MATCH:
        return "ledger"
    if verdict.outcome is not Outcome.NO_MATCH or found is None:
        return ""
    return "accuser" if found == accused else "neither"


def dispute_key(data: bytes, dispute: Dispute) -> str:
    """A name of its own for a dispute: step, accuser, digest."""
    body = dispute.body.certificate.body
    return f"disputes/step-{body.step}-{body.auditor[:16]}-{object_digest(data)[:16]}.json"


def save_dispute(store: Store, data: bytes) -> str:
    """Write a dispute file; its key."""
    key = dispute_key(data, Dispute.parse(data, "dispute", CertificateFault))
    store.create(key, data)
    return key
