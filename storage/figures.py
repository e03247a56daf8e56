"""Figures for people, beside the ledger and in none of its digests: held-out losses, diagnostics, dead tensors.

    probe/<k>.json            loss of state k on each source's held-out windows, as float bits
    diagnostics/<step>.json   norms, quantiser steps, zero shares of one step

They follow from the state alone, so they too can be recomputed and compared: held-out losses by audit/held_out.py.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np

from kernels import canonical
from model import host
from model.memory import MemoryPlan
from storage import engine
from storage.beside import MAX_DIGESTS, digests_key
from storage.corpus.spec import Name
from storage.engine import State, StepRecord
from storage.errors import InputFault, MissingObject, VerbatimError
from storage.ledger import Ledger
from storage.records import Bits, Count, Digest, Record
from storage.run import Run
from storage.store import Store, create_same
from storage.team import Team

MAX_PROBE = 1 << 20
MAX_DIAGNOSTICS = 16 << 20
ZERO_LIMIT = 100  # steps running with a gradient of exactly zero: the tensor is not connected


class SourceLoss(Record):
    """Mean negative log-likelihood in nats over a source's held-out windows; None where not finite."""

    loss: Bits | None
    windows: Count

    def value(self) -> float | None:
        """The loss as a number, which float32 and so a float hold exactly."""
        return None if self.loss is None else float(canonical.from_bits(self.loss))


class Probe(Record):
    """Held-out losses of state `step`."""

    kind: Literal["probe"] = "probe"
    step: Count
    state: Digest
    held_out_root: Digest
    sources: dict[Name, SourceLoss]

    def mean(self) -> np.float32 | None:
        """Mean over all held-out windows, from the sources' means, rounded once to float32; None where one of them is
        not finite, and where there are no windows."""
        total, windows = Fraction(0), 0
        for source in self.sources.values():
            if (loss := source.value()) is None:
                return None
            total += source.windows * Fraction(loss)
            windows += source.windows
        return host.f32(total / windows) if windows else None


class Diagnostics(Record):
    """What the model measured of one step, by tensor."""

    kind: Literal["diagnostics"] = "diagnostics"
    step: Count
    tensors: dict[str, dict[str, Any]]


def probe_key(step: int) -> str:
    """Where the probe of state `step` lies."""
    return f"probe/{step:08d}.json"


def load_probe(store: Store, ledger: Ledger, step: int) -> Probe:
    """The probe of state `step`; InputFault if it is of another state or other windows than the ledger's."""
    key = probe_key(step)
    probe = Probe.parse(store.read(key, limit=MAX_PROBE), key)
    for what, found, expected in (
        ("step", probe.step, step),
        ("state root", probe.state, ledger.state_root(step)),
        ("held-out root", probe.held_out_root, ledger.header.held_out_root),
    ):
        if found != expected:
            raise InputFault(f"{key}: its {what} is {found}, expected {expected}", cause="it is another run's")
    return probe


def save_probe(run: Run, backend: ModuleType, state: State, memory: MemoryPlan, team: Team) -> Probe:
    """The held-out losses of this state, evaluated unless they are there already."""
    try:
        return load_probe(run.store, run.ledger, state.step)
    except MissingObject:
        probe = measured(run, backend, state, memory, team)
        create_same(run.store, probe_key(state.step), probe.canonical())
        return probe


def measured(
    run: Run,
    backend: ModuleType,
    state: State,
    memory: MemoryPlan,
    team: Team,
    take: Callable[[str, np.ndarray], None] = lambda source, sums: None,
) -> Probe:
    """The held-out losses of this state, evaluated now; nothing is written. Training and audits both come here.

    take: is given, by source, each window's summed loss: int64[windows] in units of 2⁻²⁴ nats.
    """
    return Probe(
        step=state.step,
        state=run.ledger.state_root(state.step),
        held_out_root=run.stream.manifest.held_out_root,
        sources=_losses(run, backend, state, memory, team, take),
    )


def _losses(
    run: Run,
    backend: ModuleType,
    state: State,
    memory: MemoryPlan,
    team: Team,
    take: Callable[[str, np.ndarray], None],
) -> dict[str, SourceLoss]:
    windows, start = run.stream.held_out(), 0
    losses = {}
    for source in run.stream.manifest.mix.sources:
        part = windows[start : start + source.held_out.windows]
        start += len(part)
        if len(part):
            with team.doing("evaluate", part):
                bits = engine.evaluate(run.spec, backend, state, part, memory, team.group, partial(take, source.name))
            losses[source.name] = SourceLoss(loss=bits, windows=len(part))
    return losses


def diagnostics_key(step: int) -> str:
    """Where the diagnostics of a step lie."""
    return f"diagnostics/{step:08d}.json"


def load_diagnostics(store: Store, step: int) -> Diagnostics:
    """The diagnostics of a step; InputFault if they are another's. No digest covers them but the release's list."""
    key = diagnostics_key(step)
    found = Diagnostics.parse(store.read(key, limit=MAX_DIAGNOSTICS), key)
    if found.step != step:
        raise InputFault(f"{key}: it is of step {found.step}", cause="the file was renamed")
    return found


def save_diagnostics(run: Run, record: StepRecord) -> None:
    """Write a step's diagnostics, if it has any."""
    if record.diagnostics is not None:
        document = Diagnostics(step=record.step, tensors=record.diagnostics)
        create_same(run.store, diagnostics_key(record.step), document.canonical())


class ZeroWatch:
    """Counts, across restarts, how many steps running a tensor's gradient was exactly zero."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._counts: dict[str, int] = {}

    def see(self, record: StepRecord) -> None:
        """Take note of one step; VerbatimError once a tensor has been dead for ZERO_LIMIT steps."""
        if record.gradient is None:
            return  # the step was void: it says nothing about its tensors
        self._counts = {name: 1 + self._before(record, name) for name in record.zero_gradients}
        for name, count in self._counts.items():
            if count >= ZERO_LIMIT:
                raise VerbatimError(
                    f"the gradient of {name} was exactly zero in {count} steps running, to step {record.step}",
                    cause="the tensor is not connected to the loss, or its quantiser swallows everything",
                    next_step=f"look at diagnostics/ in {self._run.store.uri}",
                )

    def _before(self, record: StepRecord, name: str) -> int:
        """Steps running before this one: as counted here, or read from the digests that earlier segments left."""
        if name in self._counts or record.step == 0:
            return self._counts.get(name, 0)
        count = 0
        while count < ZERO_LIMIT and count < record.step:
            if _gradient_digest(self._run, record.step - 1 - count, name) != record.gradients[name]:
                break  # one shape and all zero is one digest
            count += 1
        return count


def _gradient_digest(run: Run, step: int, name: str) -> str | None:
    try:
        document = canonical.loads(run.store.read(digests_key(step), limit=MAX_DIGESTS))
        return str(document["gradient"][name])
    except (MissingObject, canonical.NotCanonical, KeyError, TypeError):
        return None
