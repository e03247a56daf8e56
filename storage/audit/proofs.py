"""Proofs of replay made again: so a certificate that was earned is told from one that was copied and signed anew.

A proof is keyed by its auditor, so that nobody can use another's; but only who replays the piece can make it anew and
compare. One replay serves all certificates of a piece, whoever signed them.
"""

from collections.abc import Sequence
from types import ModuleType

from model.state import root
from storage import engine
from storage.audit import held_out
from storage.audit.certificate import HELD_OUT, PIECE, Body, piece_proof, replay_proof
from storage.audit.confirm import confirmed
from storage.audit.pieces import redo
from storage.audit.replay import INITIAL, Replay, find, open_checked
from storage.audit.verdict import AuditProgress, Outcome, Report
from storage.engine import State
from storage.errors import CertificateFault, Divergence, InputFault, MachineFault, Refused
from storage.figures import Probe
from storage.ledger import Entry
from storage.run import Run, open_release
from storage.store import Store, object_digest

FAULTS = {
    Outcome.NO_MATCH: Divergence,
    Outcome.INPUT_FAULT: InputFault,
    Outcome.MACHINE_FAULT: MachineFault,
    Outcome.REFUSED: Refused,
}


class _Proofs:
    """A Witness that makes the proof of each of these certificates from what the replay ended with."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self.bodies = bodies
        self.entry: Entry | None = None
        self.made: list[str] = []

    def before(self, run: Run, backend: ModuleType, state: State) -> ModuleType:
        return backend

    def after(self, run: Run, replay: Replay) -> None:
        self.entry = replay.last.entry
        self.made = [
            replay_proof(body.auditor, body.run, body.piece, body.beacon, replay.gradient, replay.state)
            for body in self.bodies
        ]


def check_proofs(store: Store, bodies: Sequence[Body], backend: str, report: Report = lambda progress: None) -> None:
    """Replay the pieces of these verified certificates; CertificateFault for the first that no replay could have made.

    Raises MachineFault, InputFault or Refused where a piece cannot be replayed here.
    """
    parts = [body for body in bodies if PIECE.fullmatch(body.piece)]
    whole = [body for body in bodies if body.step is not None and not PIECE.fullmatch(body.piece)]
    for step in sorted({body.step for body in whole if body.step is not None}):
        _check_step(store, step, [body for body in whole if body.step == step], backend, report)
    measured = [body for body in bodies if HELD_OUT.fullmatch(body.piece)]
    if parts or measured:
        engine.self_test(backend, lambda text: report(AuditProgress(text, None, 0, 0, None)))
        run = open_checked(store)
        for piece in sorted({body.piece for body in parts}):
            _check_part(run, piece, [body for body in parts if body.piece == piece], backend, report)
        for step in sorted({body.first_step for body in measured}):
            _check_held_out(run, [body for body in measured if body.first_step == step], backend, report)
    if initial := [body for body in bodies if body.piece == INITIAL]:
        _check_initial(open_release(store), initial, engine.load_backend(backend))


def _check_step(store: Store, step: int, bodies: Sequence[Body], backend: str, report: Report) -> None:
    proofs = _Proofs(bodies)
    verdict = confirmed(store, find(store, step, backend, report, proofs), backend, report)
    if proofs.entry is None or verdict.outcome not in (Outcome.MATCH, Outcome.NO_MATCH):
        raise FAULTS[verdict.outcome](verdict.detail)
    for body, made in zip(bodies, proofs.made, strict=True):
        _compare(body, proofs.entry, made)


def _check_part(run: Run, piece: str, bodies: Sequence[Body], backend: str, report: Report) -> None:
    _, opened, found = redo(run, piece, backend, report)
    recorded, reproduced = found.digests()
    for body in bodies:
        if (body.recorded, body.beacon, body.draw) != (recorded, opened.opening.beacon, opened.opening.draw):
            raise CertificateFault(
                f"certificate of key {body.auditor}: {body.piece} was not opened as it says: its digest of what was "
                f"opened is {body.recorded}, expected {recorded}",
                cause="it was made with another opening, or invented",
                next_step="ask the auditor which opening it was; the audit of a whole step needs none",
            )
        made = piece_proof(body.auditor, body.run, piece, body.beacon, found.proven, {})
        _compare(body, reproduced, made)


def _check_held_out(run: Run, bodies: Sequence[Body], backend: str, report: Report) -> None:
    found = held_out.redo(run, bodies[0].first_step, backend, report)
    for body in bodies:
        _compare(body, found.probe, found.proof(body.auditor))


def _check_initial(run: Run, bodies: Sequence[Body], backend: ModuleType) -> None:
    state = engine.initial_state(run.spec, backend)
    found = root(state)[0]
    for body in bodies:
        _compare(body, found, replay_proof(body.auditor, body.run, INITIAL, body.beacon, {}, state))


def _compare(body: Body, found: Entry | Probe | str, made: str) -> None:
    if body.reproduced != found:
        came, claimed = _told(found), _told(body.reproduced)
        raise CertificateFault(
            f"certificate of key {body.auditor}: {body.piece} came out as {came} here, it claims {claimed}",
            cause="its auditor did not replay the step, or on a faulty machine",
            next_step="verbatim audit the step on another machine; if that agrees, do not count this key",
        )
    if body.proof != made:
        raise CertificateFault(
            f"certificate of key {body.auditor}: its proof of replay of {body.piece} is {body.proof}, expected {made}",
            cause="its auditor did not replay the step: the proof was invented, or copied from another's certificate",
            next_step="do not count this key",
        )


def _told(came: Entry | Probe | str) -> str:
    if isinstance(came, Probe):
        return object_digest(came.canonical())
    return came.digest() if isinstance(came, Entry) else came
