"""Audits: replay a step of a published run with the function that trained, compare the whole entry, sign what came out.

    cheap checks of every entry ─▶ nearest state published, N or before ─▶ steps on the way, each compared ─▶ step N

Only the published store is read, or copies of it (mirrors.py). What is found becomes a Verdict; other errors (a full
disk, wrong usage) are raised. No no-match leaves here that a fresh process did not find too (confirm.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import numpy as np

from model.state import root
from storage import checkpoint, engine
from storage.advance import Advanced, advance
from storage.audit.certificate import Beacon, Body, replay_proof, sign
from storage.audit.check import check_entries
from storage.audit.confirm import confirmed
from storage.audit.contents import MANIFEST_KEY, MIX
from storage.audit.draw import Draw
from storage.audit.keys import Key
from storage.audit.opened import from_nearest
from storage.audit.partial import unit_by_unit
from storage.audit.preflight import preflight
from storage.audit.verdict import AuditProgress, Outcome, Report, Verdict
from storage.beside import differing_tensors
from storage.engine import State
from storage.errors import Divergence, InputFault, MachineFault, Refused
from storage.ledger import HEADER_KEY, Entry, Ledger, differing_fields
from storage.memory import moments, plan_for
from storage.mirrors import BadCopy, bad_copies
from storage.provenance import provenance
from storage.release import load_release
from storage.run import Run, run_of
from storage.segment import now
from storage.store import Store
from storage.stream import Stream
from storage.team import SOLO

INITIAL = "initial"
INITIAL_PROVES = (
    "drawn anew from the seed, the weights before the first step have the recorded root; of steps it says nothing"
)


@dataclass(frozen=True)
class Replay:
    """A replay up to the target, or to the first step that did not match; state and gradient lie on the host."""

    first: int
    last: Advanced
    state: State
    gradient: dict[str, np.ndarray]


class Witness(Protocol):
    """Looks on while a step is replayed, and changes nothing."""

    def before(self, run: Run, backend: ModuleType, state: State) -> ModuleType:
        """What to do the target step with, in place of `backend`; called before it alone, with the state on the
        backend's device."""

    def after(self, run: Run, replay: Replay) -> None:
        """What the replay ended with."""


def audit_step(
    store: Store,
    step: int,
    backend: str,
    key: Key,
    draw: Draw | None = None,
    report: Report = lambda progress: None,
    kept: Store | None = None,
    witness: Witness | None = None,
) -> Verdict:
    """Audit one step of the release in `store`. draw: the record that chose it, which the certificate then names.

    kept: this machine's own store, in which units that are done outlive an interruption (partial.py).
    """
    return confirmed(store, _find_step(store, step, backend, report, key, draw, kept, witness), backend, report)


def audit_initial(store: Store, backend: str, key: Key, report: Report = lambda progress: None) -> Verdict:
    """Draw the initial weights from the seed again and compare their root with the header's."""
    return confirmed(store, _find_initial(store, backend, report, key), backend, report)


def find(store: Store, step: int | None, backend: str, report: Report, witness: Witness | None = None) -> Verdict:
    """The verdict on one step, or on the initial state (None), that this process comes to: unsigned, unconfirmed."""
    if step is None:
        return _find_initial(store, backend, report)
    return _find_step(store, step, backend, report, witness=witness)


def _find_step(
    store: Store,
    step: int,
    backend: str,
    report: Report,
    key: Key | None = None,
    draw: Draw | None = None,
    kept: Store | None = None,
    witness: Witness | None = None,
) -> Verdict:
    def work(run: Run) -> Verdict:
        if not 0 <= step < len(run.ledger):
            raise Refused(f"step {step} is not in the ledger, which records steps 0 to {len(run.ledger) - 1}")
        if draw and (draw.run != run.ledger.run_id or step not in draw.steps):
            raise Refused(f"the draw of {draw.date} did not choose step {step} of this run")
        return _audit_step(run, step, backend, key, draw, report, kept, witness)

    return judged(store, f"step {step}", backend, report, work)


def _find_initial(store: Store, backend: str, report: Report, key: Key | None = None) -> Verdict:
    verdict = judged(store, INITIAL, backend, report, lambda run: _audit_initial(run, backend, key))
    return replace(verdict, explanation=INITIAL_PROVES) if verdict.outcome is Outcome.MATCH else verdict


def judged(store: Store, piece: str, backend: str, report: Report, work: Callable[[Run], Verdict]) -> Verdict:
    """Open the release, do the cheap checks and the work, and turn what they raise into a verdict."""
    began, passed = time.monotonic(), list[BadCopy]()
    try:
        report(AuditProgress("self-test", None, 0, 0, None))
        engine.self_test(backend, lambda text: report(AuditProgress(text, None, 0, 0, None)))
        report(AuditProgress("ledger", None, 0, 0, None))
        run = open_checked(store)
        passed = run.passed_over
        verdict = work(run)
    except Divergence as error:
        verdict = Verdict(
            Outcome.NO_MATCH, piece, str(error), differs_at=error.step, fields=error.fields, tensors=error.tensors
        )
    except MachineFault as error:
        verdict = Verdict(Outcome.MACHINE_FAULT, piece, str(error))
    except (MemoryError, RuntimeError) as error:  # an allocation or a device failed
        verdict = Verdict(Outcome.MACHINE_FAULT, piece, str(_broken_off(error)))
    except Refused as error:
        verdict = Verdict(Outcome.REFUSED, piece, str(error))
    except InputFault as error:
        verdict = Verdict(Outcome.INPUT_FAULT, piece, str(error), fault=type(error).__name__)
    return replace(verdict, seconds=time.monotonic() - began, bad_copies=(*bad_copies(store), *passed))


def _broken_off(error: Exception) -> MachineFault:
    lines = str(error).splitlines() or ["no further word"]
    return MachineFault(
        f"the replay broke off here: {type(error).__name__}: {lines[0]}",
        cause="too little memory, or a device that failed",
        next_step="free memory and audit again, or audit on another machine",
    )


def open_checked(store: Store) -> Run:
    """The release in `store`, its arithmetic installed here, its entries checked against spec and mix."""
    if not store.list(HEADER_KEY):
        raise Refused(f"{store.uri} holds no run: there is nothing to compare with", next_step="check the address")
    ledger = Ledger(store)
    engine.check_arithmetic(ledger.header.run_spec())
    listed = load_release(store, ledger).objects.get(MANIFEST_KEY)
    stream = Stream.open(store, MIX, ledger.header.mix_root, listed.digest if listed else None)
    run = run_of(store, stream, ledger)
    check_entries(run)
    return run


def _audit_step(
    run: Run,
    step: int,
    backend: str,
    key: Key | None,
    draw: Draw | None,
    report: Report,
    kept: Store | None,
    witness: Witness | None,
) -> Verdict:
    began = now()
    replay = _replay(run, step, backend, report, kept, witness)
    if witness:
        witness.after(run, replay)
    found, recorded = replay.last.entry, run.ledger[replay.last.entry.step]
    fields = differing_fields(recorded, found)
    tensors = differing_tensors(run.store, recorded, replay.last.digests) if fields else ()
    outcome = Outcome.NO_MATCH if fields else Outcome.MATCH
    return Verdict(
        outcome,
        f"step {step}",
        _detail(recorded, found, fields, tensors),
        compared=tuple(range(replay.first, found.step + 1)),
        differs_at=found.step if fields else None,
        fields=fields,
        tensors=tensors,
        certificate=sign(_body(run, f"step {step}", outcome, backend, key, draw, began, replay), key) if key else None,
    )


def _replay(
    run: Run, step: int, backend_name: str, report: Report, kept: Store | None, witness: Witness | None
) -> Replay:
    """Replay from the nearest state at or before `step`; stops early where an entry does not match."""
    backend = engine.load_backend(backend_name)
    memory = preflight(run.spec, "training" if witness else "step", backend, report)  # a witness may copy the state

    def load(first: int, source: Store) -> State:
        report(AuditProgress("checkpoint", first, 0, step + 1 - first, None))
        return checkpoint.load(source, run.ledger, first, moments(run.spec, memory, run.store))

    state = from_nearest(run, step, load).placed(backend.to_device)
    first, began = state.step, time.monotonic()
    gradient: dict[str, np.ndarray] = {}
    while True:
        done = state.step - first
        left = (time.monotonic() - began) / done * (step + 1 - state.step) if done else None
        report(AuditProgress("replay", state.step, done, step + 1 - first, left))
        gradient.clear()
        target = state.step == step
        used = witness.before(run, backend, state) if witness and target else backend
        team = unit_by_unit(run, step, kept, report) if target and not witness else SOLO  # who looks on sees each once
        last = advance(run, used, state, take=gradient.update, memory=memory, team=team)
        if state.step > step or last.entry != run.ledger[last.entry.step]:
            return Replay(first, last, state.placed(backend.to_host), gradient)


def _detail(recorded: Entry, found: Entry, fields: tuple[str, ...], tensors: tuple[str, ...]) -> str:
    if not fields:
        return f"entry {found.step} came out equal: digest {found.digest()}"
    values = (f"{name} {getattr(found, name)} (recorded {getattr(recorded, name)})" for name in fields)
    named = f"; first differing tensors: {', '.join(tensors[:8])}" if tensors else ""
    return f"entry {found.step} differs: {', '.join(values)}{named}"


def _body(
    run: Run, piece: str, outcome: Outcome, backend: str, key: Key, draw: Draw | None, began: str, replay: Replay
) -> Body:
    entry = replay.last.entry
    return Body(
        run=run.ledger.run_id,
        piece=piece,
        verdict="match" if outcome is Outcome.MATCH else "no-match",
        first_step=replay.first,
        step=entry.step,
        predecessor=run.ledger.link(entry.step),
        recorded=run.ledger[entry.step].digest(),
        reproduced=entry,
        mix_root=run.ledger.header.mix_root,
        provenance=provenance(backend),
        beacon=draw.beacon if draw else None,
        draw=draw.reference() if draw else None,
        began=began,
        ended=now(),
        proof=_proof(run, key.public, piece, draw.beacon if draw else None, replay.gradient, replay.state),
        auditor=key.public,
    )


def _proof(
    run: Run, auditor: str, piece: str, beacon: Beacon | None, gradient: dict[str, np.ndarray], state: State
) -> str:
    return replay_proof(auditor, run.ledger.run_id, piece, beacon, gradient, state)


def _audit_initial(run: Run, backend_name: str, key: Key | None) -> Verdict:
    began, backend = now(), engine.load_backend(backend_name)
    plan_for(run.spec, "initial", backend.device_memory())
    state = engine.initial_state(run.spec, backend)
    found, digests = root(state)
    recorded = run.ledger.header.initial_root
    tensors = () if found == recorded else _differing_initial(run, digests)
    outcome = Outcome.MATCH if found == recorded else Outcome.NO_MATCH
    named = f"; differing tensors: {', '.join(tensors[:8])}" if tensors else ""
    return Verdict(
        outcome,
        INITIAL,
        f"initial state root {found}, recorded {recorded}{named}",
        fields=() if found == recorded else ("initial_root",),
        tensors=tensors,
        certificate=sign(_initial_body(run, found, backend_name, key, began, state), key) if key else None,
    )


def _initial_body(run: Run, found: str, backend: str, key: Key, began: str, state: State) -> Body:
    recorded = run.ledger.header.initial_root
    return Body(
        run=run.ledger.run_id,
        piece=INITIAL,
        verdict="match" if found == recorded else "no-match",
        first_step=0,
        step=None,
        predecessor=run.ledger.run_id,
        recorded=recorded,
        reproduced=found,
        mix_root=run.ledger.header.mix_root,
        provenance=provenance(backend),
        beacon=None,
        draw=None,
        began=began,
        ended=now(),
        proof=_proof(run, key.public, INITIAL, None, {}, state),
        auditor=key.public,
    )


def _differing_initial(run: Run, digests: dict[str, str]) -> tuple[str, ...]:
    """Tensors whose digests differ from those of checkpoint 0, where one was published."""
    try:
        recorded = checkpoint.load_manifest(run.store, run.ledger, 0).tensors
    except InputFault:  # there is none, or it proves nothing: that the roots differ stands without it
        return ()
    return tuple(name for name in digests if recorded.get(name) != digests[name])
