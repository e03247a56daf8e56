"""A short account of a run, for people: how far it is, what it lost, what was checked. Read from its store alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kernels import canonical
from storage.errors import InputFault
from storage.figures import Probe, load_probe
from storage.ledger import Ledger
from storage.segment import SegmentEnd
from storage.store import Store

_PROBE = re.compile(r"probe/(\d{8})\.json")
_END = re.compile(r"segments/[^/]+\.end\.json")
_LIMIT = 1 << 20  # bytes of one of these small records


@dataclass(frozen=True)
class Account:
    """losses: of each step, in nats, None where not finite; probes: held-out losses, by state. validated: steps that a
    restart repeated and found equal to the ledger."""

    run_id: str
    mix_root: str
    initial_root: str
    trajectory_root: str
    ledger_head: str
    losses: list[float | None]
    probes: dict[int, Probe]
    validated: list[int]

    @cached_property
    def held_out(self) -> dict[int, float | None]:
        """Mean held-out losses in nats, by state; None where not finite."""
        return means(self.probes)

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)


def account(store: Store) -> Account:
    """The account of the run in `store`; its whole ledger is verified on the way."""
    ledger = Ledger(store)
    return Account(
        run_id=ledger.run_id,
        mix_root=ledger.header.mix_root,
        initial_root=ledger.header.initial_root,
        trajectory_root=ledger.trajectory_root(),
        ledger_head=ledger.head,
        losses=[None if entry.loss is None else float(canonical.from_bits(entry.loss)) for entry in ledger],
        probes=probes(store, ledger),
        validated=sorted(
            step for key in store.list("segments/") if _END.fullmatch(key) for step in _steps(store, key, ledger)
        ),
    )


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats a token costs if each is guessed by how often it occurs among `tokens` (integers, any shape)."""
    counts = np.unique(tokens, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def probes(store: Store, ledger: Ledger) -> dict[int, Probe]:
    """The held-out losses of every state that was probed, by steps done."""
    steps = [int(match[1]) for match in map(_PROBE.fullmatch, store.list("probe/")) if match]
    return {step: load_probe(store, ledger, step) for step in steps if step <= len(ledger)}


def means(found: Mapping[int, Probe]) -> dict[int, float | None]:
    """Mean held-out loss in nats of each state; None where it was not finite."""
    each = {step: probe.mean() for step, probe in found.items()}
    return {step: None if mean is None else float(mean) for step, mean in each.items()}


def _steps(store: Store, key: str, ledger: Ledger) -> range:
    end = SegmentEnd.parse(store.read(key, limit=_LIMIT), key)
    if end.run != ledger.run_id or not end.first_step + end.validated_steps <= end.last_step <= len(ledger):
        raise InputFault(
            f"{key} says that steps {end.first_step} to {end.last_step} of run {end.run} ran, {end.validated_steps} of "
            f"them compared; the ledger is of run {ledger.run_id} and has {len(ledger)} steps",
            cause="the record was edited, or copied from another run",
            next_step="move it out of the run's folder: it is in no digest, and nothing goes on from it",
        )
    return range(end.first_step, end.first_step + end.validated_steps)
