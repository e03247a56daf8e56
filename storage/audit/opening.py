"""Openings: what is published once step N was drawn, so that its pieces can be audited alone.

    checkpoints/<k>.json, objects/…    states N and N + 1, unless the release has these checkpoints
    objects/<digest>                   the fingerprints: uint64[units, parameters], little-endian, in name order
    objects/<digest>                   the summed gradient of one parameter that the beacon names: int64, little-endian
    openings/<N>.json                  what belongs together; created last, so it is there wholly or not at all

They lie beside the release (opened.py), which was signed before. Anyone can make one (open.py), always the same, and
nobody is trusted for it: states and gradient are proven by the ledger's entry; each fingerprint is a claim, which
audits of units and of the sum judge (pieces.py). The first opening of a step is its opening: coefficients from any draw
made after the entry was fixed will do.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from kernels.digest import tensor_digest
from model import schedule
from model.spec import Exact
from storage import checkpoint
from storage.audit.certificate import Beacon, DrawReference
from storage.audit.draw import Draw
from storage.audit.fingerprints import PRIME, chosen_tensor
from storage.audit.opened import is_open, opened_beside, opening_key, state_at
from storage.beside import load_digests
from storage.engine import State
from storage.errors import InputFault, MissingObject, Refused
from storage.ledger import Entry
from storage.records import Count, Digest, Record, Text
from storage.run import Run
from storage.store import Store, create_same

MAX_OPENING = 1 << 20


class Opening(Record):
    """The opening of one step. nll, lse2: sums of each unit's losses, in units of 2⁻²⁴ nats and 2⁻²⁰."""

    kind: Literal["opening"] = "opening"
    run: Digest
    step: Count
    draw: DrawReference
    beacon: Beacon
    nll: list[Count]
    lse2: list[Count]
    fingerprints: Digest
    tensor: Text
    gradient: Digest


class Unit(Record):
    """What is claimed of one unit: its losses as in Opening; a fingerprint for each parameter, 16 hex digits, in name
    order."""

    kind: Literal["unit"] = "unit"
    nll: Count
    lse2: Count
    fingerprints: list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]]

    def numbers(self) -> list[int]:
        """The fingerprints as numbers."""
        return [int(phi, 16) for phi in self.fingerprints]


def unit_count(run: Run, step: int) -> int:
    """How many units a step has."""
    return -(-schedule.plan(run.spec, step).windows // run.spec.numerics.unit_windows)


def check_divisible(run: Run, step: int) -> Entry:
    """The entry of a step; Refused where it has none, or no integer gradient that is a sum over units."""
    if not 0 <= step < len(run.ledger):
        raise Refused(f"step {step} is not in the ledger, which records steps 0 to {len(run.ledger) - 1}")
    entry, whole = run.ledger[step], f"audit it whole: verbatim audit STORE --step {step}"
    if not isinstance(run.spec.numerics.reduction, Exact):
        raise Refused(f"step {step} has no pieces: this run added gradients as floats, in an order", next_step=whole)
    if entry.gradient is None:
        raise Refused(f"step {step} has no pieces: its gradient was not finite", next_step=whole)
    return entry


def state_part(run: Run, step: int, tensors: list[str]) -> State:
    """A published state with some of its tensors alone, named as "weights/…", proven by the ledger."""
    store = state_at(run.store, step)
    if store is None:
        raise InputFault(f"{run.store.uri}: state {step} is not there, though its step was opened")
    return checkpoint.load(store, run.ledger, step, wanted=tensors)


def publish_opening(
    run: Run, target: Store, step: int, draw: Draw, units: list[Unit], gradient: dict[str, np.ndarray]
) -> "Opened":
    """Write what belongs to the states, which are there already, to a store of openings, then the opening itself.

    gradient: int64 of every parameter, of which the beacon names one. Writing the same again is fine.
    """
    table = np.array([unit.numbers() for unit in units], "<u8")
    tensor = chosen_tensor(list(gradient), draw.beacon.value, step)
    opening = Opening(
        run=run.ledger.run_id,
        step=step,
        draw=draw.reference(),
        beacon=draw.beacon,
        nll=[unit.nll for unit in units],
        lse2=[unit.lse2 for unit in units],
        fingerprints=checkpoint.put_object(target, table.tobytes()),
        tensor=tensor,
        gradient=checkpoint.put_object(target, gradient[tensor].astype("<i8").tobytes()),
    )
    create_same(target, opening_key(step), opening.canonical())
    return Opened(target, opening, table)


@dataclass(frozen=True)
class Opened:
    """A published opening, its form checked, and where it lies; fingerprints: uint64[units, parameters]."""

    store: Store
    opening: Opening
    fingerprints: np.ndarray

    def unit(self, number: int) -> Unit:
        """What it says of one unit; Refused where the step has no such unit."""
        count = len(self.opening.nll)
        if not 0 <= number < count:
            raise Refused(f"step {self.opening.step} has no unit {number}: its {count} units are 0 to {count - 1}")
        phis = [f"{phi:016x}" for phi in self.fingerprints[number].tolist()]
        return Unit(nll=self.opening.nll[number], lse2=self.opening.lse2[number], fingerprints=phis)


class AnotherDraw(InputFault):
    """An opening's coefficients are not of the draw that is audited."""


def load_opening(run: Run, step: int, draw: Draw | None = None) -> Opened:
    """The opening of a step, of several the first that can be this step's, by this draw if one is given; Refused where
    there is none, InputFault where none can be, AnotherDraw where it is of another draw."""
    key = opening_key(step)
    if not is_open(run.store, step):
        raise Refused(
            f"step {step} was not opened: there is no {key}",
            cause="nobody published it after the step was drawn",
            next_step=f"verbatim open STORE --step {step} --draw DATE; or audit the whole step",
        )
    return opened_beside(run.store).sound(key, lambda store: _read_opening(run, step, store, draw))


def _read_opening(run: Run, step: int, store: Store, draw: Draw | None) -> Opened:
    key = opening_key(step)
    opening = Opening.parse(store.read(key, limit=MAX_OPENING), key)
    names, count = list(run.spec.model.shapes()), unit_count(run, step)
    for what, found, expected in (
        ("run", opening.run, run.ledger.run_id),
        ("step", opening.step, step),
        ("number of units", (len(opening.nll), len(opening.lse2)), (count, count)),
        ("tensor", opening.tensor, chosen_tensor(names, opening.beacon.value, step)),
    ):
        if found != expected:
            raise _fault(f"{key}: its {what} is {found}, expected {expected}")
    if draw and (opening.draw, opening.beacon) != (draw.reference(), draw.beacon):
        raise AnotherDraw(
            f"step {step} was opened for the draw of {opening.draw.date} ({opening.draw.record}), not for that of "
            f"{draw.date} ({draw.reference().record})",
            cause="it was drawn twice, or the opening's draw is another than the recorded one",
            next_step="name the draw that it was opened for, or audit the whole step",
        )
    table = np.frombuffer(_read(store, opening.fingerprints, 8 * count * len(names)), "<u8")
    if table.max() >= PRIME:
        raise _fault(f"{key}: a fingerprint is {table.max()}; they are below {PRIME}")
    return Opened(store, opening, table.reshape(count, len(names)))


def load_gradient(run: Run, opened: Opened) -> np.ndarray:
    """The summed gradient int64 of the opening's tensor, proven by the entry."""
    name, entry, digest = opened.opening.tensor, run.ledger[opened.opening.step], opened.opening.gradient
    shape = run.spec.model.shapes()[name]
    size = 8 * int(np.prod(shape, dtype=np.int64))
    data = opened_beside(run.store).sound(checkpoint.object_key(digest), lambda store: _read(store, digest, size))
    gradient = np.array(np.frombuffer(data, "<i8").reshape(shape), np.int64)
    found, recorded = tensor_digest(name, gradient), load_digests(run.store, entry).gradient.get(name)
    if found != recorded:
        raise _fault(f"{opening_key(entry.step)}: the gradient of {name} has digest {found}, recorded {recorded}")
    return gradient


def _read(store: Store, digest: str, size: int) -> bytes:
    key = checkpoint.object_key(digest)
    try:
        if (found := store.size(key)) != size:
            raise _fault(f"{key} holds {found} bytes, expected {size}")
        return store.read(key, digest, limit=size)
    except MissingObject:  # then it may be the opening that names another
        raise
    except InputFault as fault:
        fault.key = key
        raise


def _fault(message: str) -> InputFault:
    return InputFault(
        message,
        cause="the opening was damaged, or made for another step or run",
        next_step="fetch it again from its publisher, or audit the whole step, which needs no opening",
    )
