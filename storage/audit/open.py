"""Making an opening: the states around a drawn step, and the fingerprints of its units, from the published run alone.

    nearest state ─▶ steps before N, each compared ─▶ state N, published
                  ─▶ each unit of N, fingerprinted ─▶ step N, compared ─▶ state N + 1, published ─▶ the opening

It is written to a store of openings beside the release (opened.py), and nothing that the ledger does not confirm. The
units and the step are computed apart, so a machine that is at odds with itself is found: the units' fingerprints must
sum to the step's.
"""

import time
from types import ModuleType

import numpy as np

from model import schedule
from model.memory import MemoryPlan
from storage import checkpoint, engine
from storage.advance import Advanced, advance
from storage.audit.draw import Draw
from storage.audit.fingerprints import PRIME, check_size, fingerprints
from storage.audit.opened import from_nearest, is_open, opened_beside, state_at
from storage.audit.opening import Opened, Unit, check_divisible, load_opening, publish_opening, unit_count
from storage.audit.partial import unit_by_unit
from storage.audit.preflight import preflight
from storage.audit.replay import open_checked
from storage.audit.verdict import AuditProgress, Report
from storage.claims import FAULTS
from storage.engine import State
from storage.errors import MachineFault, Refused
from storage.ledger import check_same
from storage.memory import moments
from storage.run import Run
from storage.store import Store


def open_step(
    store: Store,
    step: int,
    draw: Draw,
    backend_name: str,
    report: Report = lambda progress: None,
    kept: Store | None = None,
) -> Opened:
    """The opening of a step that `draw` chose, made and published unless it is there. It can be stopped and repeated.

    store: the release; what is made is written beside it, beside the first of several copies. kept: this machine's own
    store, in which units that are done outlive an interruption.

    Raises Divergence where a replayed step is not what the ledger records, Refused where the draw did not choose the
    step or it has no pieces, InputFault and MachineFault as an audit does, StorageError.
    """
    engine.self_test(backend_name, lambda text: report(AuditProgress(text, None, 0, 0, None)))
    run = open_checked(store)
    check_divisible(run, step)
    if draw.run != run.ledger.run_id or step not in draw.steps:
        raise Refused(f"the draw of {draw.date} did not choose step {step} of this run")
    if is_open(store, step):
        return load_opening(run, step)
    target, backend = opened_beside(store).stores[0], engine.load_backend(backend_name)
    memory = preflight(run.spec, "step", backend, report, target, _size(run, step))
    state = _state_before(run, target, backend, memory, step, report)
    units = _units(run, backend, state, memory, draw.beacon.value, report, kept)
    gradient: dict[str, np.ndarray] = {}
    report(AuditProgress("replay", step, 0, 1, None))
    team = unit_by_unit(run, step, kept, report)
    _compared(run, advance(run, backend, state, take=gradient.update, memory=memory, team=team))
    _check_sums(run, step, units, fingerprints(gradient, draw.beacon.value, step))
    _publish_state(run, target, backend, state)
    return publish_opening(run, target, step, draw, units, gradient)


def _state_before(run: Run, target: Store, backend: ModuleType, memory: MemoryPlan, step: int, report: Report) -> State:
    """State `step` on the device, from the nearest that was published; and published in `target`, unless it is."""

    def load(first: int, source: Store) -> State:
        report(AuditProgress("checkpoint", first, 0, step - first, None))
        return checkpoint.load(source, run.ledger, first, moments(run.spec, memory, run.store))

    state = from_nearest(run, step, load).placed(backend.to_device)
    first, began = state.step, time.monotonic()
    while state.step < step:
        done = state.step - first
        left = (time.monotonic() - began) / done * (step - state.step) if done else None
        report(AuditProgress("replay", state.step, done, step - first, left))
        _compared(run, advance(run, backend, state, memory=memory))
    if first < step:
        _publish_state(run, target, backend, state)
    return state


def _compared(run: Run, found: Advanced) -> None:
    check_same(run.ledger[found.entry.step], found.entry)


def _publish_state(run: Run, target: Store, backend: ModuleType, state: State) -> None:
    """Unless it is there already: a checkpoint of the release, or an opened state that is what the ledger records."""
    source = state_at(run.store, state.step)
    try:
        if source is not None and source is not run.store:
            checkpoint.check(source, run.ledger, state.step)
    except FAULTS:
        source = None
    if source is None:
        checkpoint.save(target, run.ledger, state.placed(backend.to_host))


def _units(
    run: Run,
    backend: ModuleType,
    state: State,
    memory: MemoryPlan,
    beacon: str,
    report: Report,
    kept: Store | None,
) -> list[Unit]:
    """Losses and fingerprints of each unit of the step that `state` stands before; those that were kept are not made
    again."""
    plan, size = schedule.plan(run.spec, state.step), run.spec.numerics.unit_windows
    count, folder = unit_count(run, state.step), f"partial/{run.ledger.run_id[:16]}/{state.step:08d}-{beacon[:16]}/"
    keys = [f"{folder}{unit:05d}.json" for unit in range(count)]
    there = kept.list(folder) if kept else []
    found = [Unit.parse(kept.read(key), key) for key in keys if kept and key in there]
    began, first = time.monotonic(), len(found)
    report(AuditProgress("unit", state.step, first, count, None))
    if first == count:
        return found
    windows = run.stream.windows(plan.first_window + first * size, plan.windows - first * size)
    for summed in engine.each_unit(run.spec, backend, state.weights, windows, memory):
        found.append(unit_of(summed, backend, count, beacon, state.step))
        if kept:
            kept.create(keys[len(found) - 1], found[-1].canonical())
        left = (time.monotonic() - began) / (len(found) - first) * (count - len(found))
        report(AuditProgress("unit", state.step, len(found), count, left))
    return found


def _size(run: Run, step: int) -> int:
    """Bytes that an opening takes on disk, at most: two states, a table, a gradient."""
    numbers = run.spec.model.parameter_count()
    return 2 * 12 * numbers + 8 * unit_count(run, step) * len(run.spec.model.shapes()) + 8 * numbers


def unit_of(summed: engine.Summed, backend: ModuleType, units: int, beacon: str, step: int) -> Unit:
    """What an opening says of a unit with these gradients, one of `units` of the step."""
    gradient = {name: backend.to_host(sums) for name, sums in summed.sums.items()}
    check_size(gradient, units, step)
    phis = [f"{phi:016x}" for phi in fingerprints(gradient, beacon, step)]
    return Unit(nll=summed.nll, lse2=summed.lse2, fingerprints=phis)


def _check_sums(run: Run, step: int, units: list[Unit], whole: list[int]) -> None:
    """MachineFault unless the units make the step that the ledger confirms."""
    entry = run.ledger[step]
    losses = engine.mean_losses(
        schedule.plan(run.spec, step).windows * run.spec.model.seq_len,
        sum(unit.nll for unit in units),
        sum(unit.lse2 for unit in units),
    )
    sums = [sum(column) % PRIME for column in zip(*(unit.numbers() for unit in units), strict=True)]
    if sums != whole or losses != (entry.loss, entry.z_loss):
        raise MachineFault(
            f"the {len(units)} units of step {step}, computed alone, do not sum to the step that the ledger confirms",
            cause="faulty memory or processor, or too little memory",
            next_step="verbatim doctor, then open the step on another machine",
        )
