"""Audits of parts of a step that was opened, each alone, in a fraction of the step's time.

    unit u    from the weights before the step and the unit's windows its gradient again; its losses and fingerprints
              must be the opening's. It proves this unit, one of the step's U, against the opening.
    sum       for the parameter that the beacon names: the gradient G is the entry's, its fingerprint is the sum of the
              units', and the units' losses make the entry's. It proves that the units add up to what the ledger
              records, for one parameter.
    update    for the same parameter: AdamW from G, the state before, and the entry's rate and gradient norm makes the
              state after. It proves one parameter's update; the norm itself is taken from the entry.

A match of all units, the sum and the update therefore proves less than an audit of the step: the sum and the update are
of one parameter, which nobody could know when the step was done. A no-match says that entry and opening do not belong
together; an audit of the whole step says which of the two is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from kernels import canonical
from kernels.digest import digest, tensor_digest
from model import schedule, spike
from storage import engine
from storage.audit.certificate import PIECE, Body, piece_proof, sign
from storage.audit.confirm import confirmed
from storage.audit.draw import Draw
from storage.audit.fingerprints import PRIME, check_size, fingerprint
from storage.audit.keys import Key
from storage.audit.open import unit_of
from storage.audit.opening import (
    AnotherDraw,
    Opened,
    check_divisible,
    load_gradient,
    load_opening,
    state_part,
    unit_count,
)
from storage.audit.preflight import preflight
from storage.audit.replay import judged
from storage.audit.verdict import AuditProgress, Outcome, Report, Verdict
from storage.engine import State
from storage.errors import Refused, UsageError
from storage.ledger import Entry
from storage.provenance import provenance
from storage.run import Run
from storage.segment import now
from storage.store import Store

# What a match of a part says, in place of what an audit of a step says.
PROVES = {
    "unit": "this unit's gradient and losses came out as they were opened; of the other units it says nothing",
    "sum": "the units that were opened make one parameter's summed gradient and the step's losses; whether a unit is "
    "right, its own audit says",
    "update": "of one parameter, the state before the step and the summed gradient give the state after it; of the "
    "others it says nothing",
}
ELSE = "entry and opening do not belong together: an audit of the whole step says which of them is wrong"


@dataclass(frozen=True)
class Found:
    """What came of a part. recorded, found: the values that must be equal, by name; "gradient/<parameter>" and the like
    for tensors, else fields of the entry. proven: the tensors by group and name that a proof of replay is made of.
    """

    recorded: Mapping[str, Any]
    found: Mapping[str, Any]
    proven: Mapping[str, Mapping[str, np.ndarray]]
    rows: str = ""  # where it differs, if that is known

    def digests(self) -> tuple[str, str]:
        """Of what was recorded and of what was found, as a certificate says them."""
        recorded, found = (digest(canonical.dumps(dict(said)), "piece") for said in (self.recorded, self.found))
        return recorded, found


def audit_piece(
    store: Store, piece: str, draw: Draw, backend: str, key: Key, report: Report = lambda progress: None
) -> Verdict:
    """Audit "step N unit U", "step N sum" or "step N update" of the release in `store`, which was opened for `draw`."""
    return confirmed(store, _find(store, piece, backend, report, key, draw), backend, report)


def find_piece(store: Store, piece: str, backend: str, report: Report) -> Verdict:
    """The verdict on a piece that this process comes to: unsigned, unconfirmed, whatever draw it was opened for."""
    return _find(store, piece, backend, report, None, None)


def _find(store: Store, piece: str, backend: str, report: Report, key: Key | None, draw: Draw | None) -> Verdict:
    if not PIECE.fullmatch(piece):
        raise UsageError(f"{piece!r} is no part of a step", next_step="verbatim audit --help")

    def work(run: Run) -> Verdict:
        began = now()
        entry, opened, found = redo(run, piece, backend, report, draw)
        signed = _certificate(run, piece, entry, opened, found, backend, key, began) if key else None
        return _verdict(piece, entry, found, signed)

    verdict = judged(store, piece, backend, report, work)
    return replace(verdict, explanation=PROVES[piece.split()[2]]) if verdict.outcome is Outcome.MATCH else verdict


def redo(run: Run, piece: str, backend: str, report: Report, draw: Draw | None = None) -> tuple[Entry, Opened, Found]:
    """What comes of a part on this machine; Refused if it was not opened, or for another draw than this one."""
    _, step, part, *unit = piece.split()
    entry = check_divisible(run, int(step))
    try:
        opened = load_opening(run, entry.step, draw)
    except AnotherDraw as other:
        raise Refused(other.message, cause=other.cause, next_step=other.next_step) from None
    work = _unit(int(unit[0])) if unit else {"sum": _sum, "update": _update}[part]
    return entry, opened, work(run, entry, opened, engine.load_backend(backend), report)


def _unit(number: int) -> Callable[[Run, Entry, Opened, ModuleType, Report], Found]:
    def work(run: Run, entry: Entry, opened: Opened, backend: ModuleType, report: Report) -> Found:
        claimed, opening = opened.unit(number), opened.opening
        memory = preflight(run.spec, "unit", backend, report)
        names, size = list(run.spec.model.shapes()), run.spec.numerics.unit_windows
        report(AuditProgress("checkpoint", entry.step, 0, 1, None))
        weights = state_part(run, entry.step, [f"weights/{name}" for name in names]).weights
        first = schedule.plan(run.spec, entry.step).first_window + number * size
        last = min(first + size, entry.first_window + entry.windows)
        windows = run.stream.windows(first, last - first)
        report(AuditProgress("unit", number, 0, 1, None))
        placed = {name: backend.to_device(weights[name]) for name in names}
        summed = next(engine.each_unit(run.spec, backend, placed, windows, memory))
        if not summed.finite:
            raise Refused(f"unit {number} is not finite, so it has no gradient")
        made = unit_of(summed, backend, unit_count(run, entry.step), opening.beacon.value, entry.step)
        gradient = {name: backend.to_host(summed.sums[name]) for name in names}
        claims, results = (
            {f"gradient/{name}": phi for name, phi in zip(names, unit.fingerprints, strict=True)}
            | {"loss": unit.nll, "z_loss": unit.lse2}
            for unit in (claimed, made)
        )
        return Found(claims, results, {"gradient": gradient})

    return work


def _sum(run: Run, entry: Entry, opened: Opened, backend: ModuleType, report: Report) -> Found:
    opening, gradient = opened.opening, load_gradient(run, opened)
    check_size({opening.tensor: gradient}, 1, entry.step)
    column = opened.fingerprints[:, list(run.spec.model.shapes()).index(opening.tensor)]
    tokens = entry.windows * run.spec.model.seq_len
    loss, z_loss = engine.mean_losses(tokens, sum(opening.nll), sum(opening.lse2))
    name, phi = f"gradient/{opening.tensor}", fingerprint(gradient, opening.beacon.value, entry.step, opening.tensor)
    recorded = {name: f"{phi:016x}", "loss": entry.loss, "z_loss": entry.z_loss}
    found = {name: f"{sum(column.tolist()) % PRIME:016x}", "loss": loss, "z_loss": z_loss}
    return Found(recorded, found, {"gradient": {opening.tensor: gradient}})


def _update(run: Run, entry: Entry, opened: Opened, backend: ModuleType, report: Report) -> Found:
    name, gradient = opened.opening.tensor, load_gradient(run, opened)
    tensors = [f"{group}/{name}" for group in ("m", "v", "weights")]
    report(AuditProgress("checkpoint", entry.step, 0, 1, None))
    state, recorded = (state_part(run, step, tensors) for step in (entry.step, entry.step + 1))
    _advance_scalars(run, entry, state)
    if not entry.event:  # else the spike protocol skipped it
        arrays = state.weights[name], state.m[name], state.v[name]
        lr, clip = canonical.from_bits(entry.lr), engine.clip_factor(run.spec, _norm(entry))
        scale = engine.gradient_scale(run.spec, entry.windows * run.spec.model.seq_len)
        engine.update(run.spec, backend, name, arrays, backend.to_device(gradient), state.updates, lr, scale, clip)
    made, after = state.tensors(), recorded.tensors()
    claims, results = (
        {tensor: tensor_digest(tensor, array) for tensor, array in known.tensors().items()} | known.scalars()
        for known in (recorded, state)
    )
    return Found(claims, results, {"gradient": {name: gradient}, "state": made}, _first_rows(after, made))


def _advance_scalars(run: Run, entry: Entry, state: State) -> None:
    """Make the scalars of `state` those after the entry's step."""
    state.spike, event, _ = spike.decide(run.spec.spike, state.spike, entry.step, _norm(entry))
    state.updates += not event
    state.step, state.tokens, state.windows = entry.step + 1, entry.tokens, entry.first_window + entry.windows


def _norm(entry: Entry) -> np.float32:
    return canonical.from_bits(str(entry.grad_norm))  # never None where the gradient is not


def _first_rows(recorded: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]) -> str:
    """The first row of each tensor in which the published state and the one that was made differ."""
    rows = []
    for name, array in recorded.items():
        differs = np.nonzero((array.view(np.uint32) != made[name].view(np.uint32)).reshape(len(array), -1).any(axis=1))
        rows += [f"{name} from row {differs[0][0]} on"] if differs[0].size else []
    return ", ".join(rows)


def _verdict(piece: str, entry: Entry, found: Found, certificate: bytes | None) -> Verdict:
    names = tuple(name for name in found.recorded if found.recorded[name] != found.found[name])
    if not names:
        outcome, detail = Outcome.MATCH, f"{piece} came out as it was opened"
    else:
        values = [f"{name} {found.found[name]} (opened {found.recorded[name]})" for name in names]
        shown = f"{', '.join(values[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        outcome, detail = Outcome.NO_MATCH, f"{piece} differs: {shown}{'; ' if found.rows else ''}{found.rows}; {ELSE}"
    tensors = tuple(name for name in names if "/" in name)
    fields = tuple(name for name in names if "/" not in name)
    return Verdict(
        outcome,
        piece,
        detail,
        differs_at=entry.step if names else None,
        fields=fields,
        tensors=tensors,
        certificate=certificate,
    )


def _certificate(
    run: Run, piece: str, entry: Entry, opened: Opened, found: Found, backend: str, key: Key, began: str
) -> bytes:
    opening, run_id = opened.opening, run.ledger.run_id
    recorded, reproduced = found.digests()
    body = Body(
        run=run_id,
        piece=piece,
        verdict="match" if recorded == reproduced else "no-match",
        first_step=entry.step,
        step=entry.step,
        predecessor=run.ledger.link(entry.step),
        recorded=recorded,
        reproduced=reproduced,
        mix_root=run.ledger.header.mix_root,
        provenance=provenance(backend),
        beacon=opening.beacon,
        draw=opening.draw,
        began=began,
        ended=now(),
        proof=piece_proof(key.public, run_id, piece, opening.beacon, found.proven, {}),
        auditor=key.public,
    )
    return sign(body, key)
