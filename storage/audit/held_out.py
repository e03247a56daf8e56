"""Audits of held-out losses: a published state on the held-out windows again, compared with its record, and signed.

    probe/<k>.json    of each source the mean loss of state k, the exact sum of integers rounded once (figures.py)

The ledger holds the root of the state and of the windows, from which the losses follow; the release lists the record.
So a match says: this state, on these windows, has exactly these losses. The piece is named "held-out k". Its proof of
replay is made of each window's own sum, which no record holds.
"""

from dataclasses import dataclass, replace

import numpy as np

from storage import checkpoint, engine
from storage.audit.certificate import HELD_OUT, Body, piece_proof, sign
from storage.audit.confirm import confirmed
from storage.audit.keys import Key
from storage.audit.opened import from_nearest
from storage.audit.preflight import preflight
from storage.audit.replay import judged
from storage.audit.verdict import AuditProgress, Outcome, Report, Verdict
from storage.engine import State
from storage.errors import CertificateFault, MissingObject, Refused
from storage.figures import Probe, SourceLoss, load_probe, measured, probe_key
from storage.ledger import Ledger
from storage.provenance import provenance
from storage.run import Run
from storage.segment import now
from storage.store import Store, object_digest
from storage.team import SOLO

# (explanation, next) in place of what an audit of a step says.
TOLD = {
    Outcome.MATCH: (
        "this state has the recorded mean loss on each source's held-out windows; of its training it says nothing",
        Outcome.MATCH.next_step,
    ),
    Outcome.NO_MATCH: (
        "the losses of this state are not those that the release records",
        "verbatim evaluate on another machine, by another backend; verbatim verify checks the certificates of both",
    ),
    Outcome.REFUSED: (
        "there is nothing to compare with: losses are recorded of checkpoints alone",
        "choose a checkpoint; without --step it is the last",
    ),
}


@dataclass(frozen=True)
class Found:
    """The losses that came out, and each window's sum by source: int64[windows] in units of 2⁻²⁴ nats."""

    run: str
    probe: Probe
    sums: dict[str, np.ndarray]

    def proof(self, auditor: str) -> str:
        """The proof of replay that this auditor must show."""
        return piece_proof(auditor, self.run, _piece(self.probe.step), None, {"held_out": self.sums}, {})


def audit_held_out(store: Store, step: int, backend: str, key: Key, report: Report = lambda progress: None) -> Verdict:
    """Audit the held-out losses of state `step` of the release in `store`."""
    return confirmed(store, _find(store, step, backend, report, key), backend, report)


def find_held_out(store: Store, piece: str, backend: str, report: Report) -> Verdict:
    """The verdict on the piece "held-out k" that this process comes to: unsigned, unconfirmed."""
    return _find(store, int(piece.split()[1]), backend, report, None)


def redo(run: Run, step: int, backend_name: str, report: Report) -> Found:
    """The held-out losses of a published state, on this machine; Refused if the state was not published."""
    if step > len(run.ledger):
        raise Refused(f"state {step} is not in the ledger, which records {len(run.ledger)} steps")
    backend = engine.load_backend(backend_name)
    memory = preflight(run.spec, "unit", backend, report)
    state = from_nearest(run, step, lambda k, source: _weights(run, step, k, source, report)).placed(backend.to_device)
    report(AuditProgress("held-out windows", step, 0, 1, None))
    sums: dict[str, np.ndarray] = {}
    probe = measured(run, backend, state, memory, SOLO, sums.__setitem__)
    return Found(run.ledger.run_id, probe, dict(sorted(sums.items())))


def _weights(run: Run, step: int, nearest: int, source: Store, report: Report) -> State:
    """The weights of state `step`, which lies in `source` if it is the nearest that was published."""
    if nearest != step:
        raise Refused(
            f"state {step} was not published; the last one before it is state {nearest}",
            cause="losses are measured of checkpoints",
            next_step=f"verbatim evaluate {run.store.uri} --step {nearest}",
        )
    report(AuditProgress("checkpoint", step, 0, 1, None))
    wanted = [f"weights/{name}" for name in run.spec.model.shapes()]
    return checkpoint.load(source, run.ledger, step, wanted=wanted)


def check_recorded(store: Store, ledger: Ledger, body: Body) -> None:
    """CertificateFault unless a verified certificate of held-out losses compared the record that the release holds."""
    match = HELD_OUT.fullmatch(body.piece)
    if match is None:
        return
    try:
        held = object_digest(load_probe(store, ledger, int(match[1])).canonical())
    except MissingObject:
        held = "none"
    if held != body.recorded:
        raise CertificateFault(
            f"certificate: it compared a record of {body.piece} with digest {body.recorded}, the release's is {held}",
            cause="it is about another release of the run, or its auditor was shown another record",
            next_step="ask the auditor for the record, and its publisher for the release",
        )


def _find(store: Store, step: int, backend: str, report: Report, key: Key | None) -> Verdict:
    def work(run: Run) -> Verdict:
        began = now()
        try:
            recorded = load_probe(run.store, run.ledger, step) if step <= len(run.ledger) else None
        except MissingObject:
            raise Refused(
                f"the release holds no {probe_key(step)}: there is nothing to compare with",
                cause="no checkpoint was made after so many steps",
                next_step="leave --step out for the last one",
            ) from None
        found = redo(run, step, backend, report)
        assert recorded is not None  # else redo() refuses
        signed = sign(_body(run, recorded, found, backend, key, began), key) if key else None
        return _verdict(recorded, found.probe, signed)

    verdict = judged(store, _piece(step), backend, report, work)
    explanation, next_step = TOLD.get(verdict.outcome, ("", ""))
    return replace(verdict, explanation=explanation, next_step=next_step)


def _verdict(recorded: Probe, found: Probe, certificate: bytes | None) -> Verdict:
    names = sorted(recorded.sources.keys() | found.sources.keys())
    fields = tuple(name for name in names if recorded.sources.get(name) != found.sources.get(name))
    told = (
        f"{name} {_told(found.sources.get(name))} (recorded {_told(recorded.sources.get(name))})" for name in fields
    )
    came = ", ".join(f"{name} {_told(loss)}" for name, loss in found.sources.items())
    return Verdict(
        Outcome.NO_MATCH if fields else Outcome.MATCH,
        _piece(found.step),
        f"held-out losses of state {found.step} differ: {', '.join(told)}" if fields else f"held-out losses: {came}",
        fields=fields,
        certificate=certificate,
    )


def _told(loss: SourceLoss | None) -> str:
    if loss is None:
        return "none"
    value = loss.value()
    return f"{'void' if value is None else format(value, '.6f')} nats (float32 {loss.loss}, {loss.windows} windows)"


def _body(run: Run, recorded: Probe, found: Found, backend: str, key: Key, began: str) -> Body:
    step, digest = found.probe.step, object_digest(recorded.canonical())
    return Body(
        run=run.ledger.run_id,
        piece=_piece(step),
        verdict="match" if object_digest(found.probe.canonical()) == digest else "no-match",
        first_step=step,
        step=None,
        predecessor=run.ledger.link(step),
        recorded=digest,
        reproduced=found.probe,
        mix_root=run.ledger.header.mix_root,
        provenance=provenance(backend),
        beacon=None,
        draw=None,
        began=began,
        ended=now(),
        proof=found.proof(key.public),
        auditor=key.public,
    )


def _piece(step: int) -> str:
    return f"held-out {step}"
