"""Narrowing a no-match: from an entry to a tensor, its leaf and row, and to an operation.

    tensor      by the digests beside the entry, at any step
    leaf, row   where the state after the step was published
    operation   the first in the trace whose result the ledger records, and records otherwise

The ledger holds nothing of an operation's inner life, so a trace can be held against it only where a result is
recorded: losses, each parameter's summed gradient, each tensor of the state. Two traces can be held against each other
at every operation: `kernels.traced.first_difference`.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Annotated

import numpy as np
from pydantic import Field

import kernels
from kernels.digest import leaf_rows
from kernels.traced import Operation, Traced
from model.memory import KEEP_ALL, MemoryPlan
from storage import checkpoint
from storage.advance import advance
from storage.audit.opened import state_at
from storage.audit.replay import Replay
from storage.beside import differing_tensors
from storage.engine import State
from storage.errors import InputFault
from storage.ledger import Entry, differing_fields
from storage.records import Count, Record, Text
from storage.run import Run

Word = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]  # the bits of any float32


class Place(Record):
    """Where a tensor of the state first differs from the published one, and in how many of its values."""

    tensor: Text
    leaf: Count
    row: Count
    values: Count
    recorded: Word
    found: Word


class Watch:
    """A Witness that traces the step: its operations and, where the entry differs, where.

    other: a trace to judge, whose deviations the reference is asked about. keep: a copy of the state before the step
    stays in `state`, for a second replay. After the replay: `entry`, `place` and `contradicted` ("" for none).
    """

    def __init__(self, other: Iterable[Operation] = (), keep: bool = False) -> None:
        self.entry: Entry | None = None
        self.place: Place | None = None
        self.contradicted = ""
        self.run: Run | None = None
        self.state: State | None = None
        self._other, self._keep = list(other), keep
        self._traced: Traced | None = None

    @property
    def operations(self) -> list[Operation]:
        """The trace; empty if the step was not reached."""
        return self._traced.trace() if self._traced else []

    def by_referee(self, operation: Operation) -> str | None:
        """What the reference gave of the operation's inputs, where it was asked."""
        return self._traced.by_referee.get(operation) if self._traced else None

    def before(self, run: Run, backend: ModuleType, state: State) -> ModuleType:
        """The backend, traced."""
        if self._keep:
            self.state = state.placed(lambda tensor: np.array(backend.to_host(tensor)))
        self._traced = Traced(backend, state.weights, self._other, kernels.backend("reference"))
        return self._traced

    def after(self, run: Run, replay: Replay) -> None:
        """Narrows what differs."""
        self.run, self.entry = run, replay.last.entry
        recorded = run.ledger[self.entry.step]
        if fields := differing_fields(recorded, self.entry):
            tensors = differing_tensors(run.store, recorded, replay.last.digests)
            self.place = first_place(run, replay.state, tensors)
            self.contradicted = first_contradicted(self.operations, fields, tensors)


def trace_again(
    run: Run, backend: ModuleType, state: State, memory: MemoryPlan = KEEP_ALL
) -> tuple[Entry, list[Operation]]:
    """(entry, trace) of the step that `state`, on the host, stands before, by another backend; `state` is used up."""
    placed = state.placed(backend.to_device)
    traced = Traced(backend, placed.weights)
    entry = advance(run, traced, placed, memory=memory).entry
    return entry, traced.trace()


def first_place(run: Run, state: State, tensors: Sequence[str]) -> Place | None:
    """Where the first of these tensors of the state first differs from the published one; None where that is not
    published, or proves nothing."""
    wanted = set(tensors)
    source = state_at(run.store, state.step)
    if source is None:
        return None
    found = state.tensors()
    try:
        for name, published in checkpoint.verified_tensors(source, run.ledger, state.step):
            if name in wanted and (place := _place(name, published, found[name])):
                return place
    except InputFault:  # that the entries differ stands without it
        pass
    return None


def _place(name: str, published: np.ndarray, found: np.ndarray) -> Place | None:
    theirs, ours = (np.ascontiguousarray(x).reshape(-1).view(np.uint32) for x in (published, found))
    differing = np.flatnonzero(theirs != ours)
    if not len(differing):
        return None
    first = int(differing[0])
    row = int(np.unravel_index(first, found.shape)[0])
    return Place(
        tensor=name,
        leaf=row // leaf_rows(found.shape, found.itemsize),
        row=row,
        values=len(differing),
        recorded=f"{theirs[first]:08x}",
        found=f"{ours[first]:08x}",
    )


def first_contradicted(operations: Sequence[Operation], fields: Sequence[str], tensors: Sequence[str]) -> str:
    """The first operation of the trace whose result is recorded, and recorded otherwise; "" where none can be named.

    A recorded gradient is a sum over units: which of them it is stays open, unless there is only one.
    """
    units = {operation.unit for operation in operations if operation.unit is not None}
    for operation in operations:
        if operation.unit in (None, max(units, default=0)) and _contradicts(operation, fields, tensors):
            return f"{operation.name} of {operation.about}" + (", in some unit" if operation.unit else "")
    return ""


def _contradicts(operation: Operation, fields: Sequence[str], tensors: Sequence[str]) -> bool:
    parameters = operation.about.split("+")
    if operation.name == "adamw":
        return any(f"{group}/{name}" in tensors for group in ("m", "v", "weights") for name in parameters)
    if operation.name == "head_backward" and {"loss", "z_loss"} & set(fields):
        return True
    gradient = operation.name in ("linear_backward", "norm_backward", "head_backward", "embed_backward")
    return gradient and any(f"gradient/{name}" in tensors for name in parameters)
