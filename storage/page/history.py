"""What a store tells of a run, gathered for its page: curves, held-out losses, diagnostics, segments, the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels import canonical
from model import schedule
from model.spec import RunSpec
from storage import checkpoint
from storage.account import means, probes
from storage.errors import InputFault
from storage.figures import Probe, diagnostics_key, load_diagnostics
from storage.ledger import Ledger
from storage.recipe import MAX_RECIPE
from storage.run import RECIPE_KEY
from storage.segment import Segment, load_segments
from storage.store import Store

DIAGNOSED = 200  # diagnostics that are read at most, evenly over the run


@dataclass(frozen=True)
class Diagnosed:
    """What was measured of D steps and T tensors: each array f64[D, T], NaN where nothing was.

    weight_norm: after the update; largest_step: of a tensor's quantiser; rim: share of its codes at the rim.
    """

    steps: list[int]
    names: list[str]
    weight_norm: np.ndarray
    largest_step: np.ndarray
    rim: np.ndarray


@dataclass(frozen=True)
class History:
    """losses, norms: f64[N] of each step, NaN where not finite; probes: held-out losses, by state; states: of which a
    checkpoint lies in the store; recipe: as text, "" without."""

    ledger: Ledger
    spec: RunSpec
    losses: np.ndarray
    norms: np.ndarray
    probes: dict[int, Probe]
    diagnosed: Diagnosed
    segments: list[Segment]
    states: list[int]
    recipe: str

    @cached_property
    def held_out(self) -> dict[int, float | None]:
        """Mean held-out losses, by state."""
        return means(self.probes)

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return schedule.total_steps(self.spec)

    @property
    def validated(self) -> list[range]:
        """Steps that a restart repeated and found equal to the ledger, as the trainer says."""
        ends = [segment.end for segment in self.segments if segment.end]
        return [range(end.first_step, end.first_step + end.validated_steps) for end in ends if end.validated_steps]


def history(store: Store, ledger: Ledger) -> History:
    """Everything that the page shows of a run. Raises InputFault for a record that is damaged or another run's."""
    return History(
        ledger=ledger,
        spec=ledger.header.run_spec(),
        losses=np.array([_value(entry.loss) for entry in ledger], np.float64),
        norms=np.array([_value(entry.grad_norm) for entry in ledger], np.float64),
        probes=probes(store, ledger),
        diagnosed=_diagnosed(store, len(ledger)),
        segments=load_segments(store, ledger),
        states=[k for k in checkpoint.steps(store) if k <= len(ledger)],
        recipe=_recipe(store),
    )


def _value(bits: str | None) -> float:
    return float("nan") if bits is None else float(canonical.from_bits(bits))


def _recipe(store: Store) -> str:
    if RECIPE_KEY not in store.list(RECIPE_KEY):
        return ""
    return store.read(RECIPE_KEY, limit=MAX_RECIPE).decode("utf-8", "replace")


def _diagnosed(store: Store, steps: int) -> Diagnosed:
    there = set(store.list("diagnostics/"))
    recorded = [step for step in range(steps) if diagnostics_key(step) in there]
    every = np.linspace(0, len(recorded) - 1, min(len(recorded), DIAGNOSED)).round().astype(int)
    chosen = [recorded[index] for index in every]
    found = [load_diagnostics(store, step).tensors for step in chosen]
    names = sorted({name for tensors in found for name in tensors})
    shape = len(found), len(names)
    arrays = {what: np.full(shape, np.nan) for what in ("weight_norm", "largest_step", "rim")}
    for row, (step, tensors) in enumerate(zip(chosen, found, strict=True)):
        for column, name in enumerate(names):
            figures = tensors.get(name, {})
            arrays["weight_norm"][row, column] = _bits(figures, "weight_norm", step)
            arrays["largest_step"][row, column] = _bits(figures, "largest_step", step)
            arrays["rim"][row, column] = _rim(figures, step)
    return Diagnosed(chosen, names, **arrays)


def _bits(figures: Mapping[str, Any], what: str, step: int) -> float:
    """The float32 of these bits, NaN where there is none. Only the publisher vouches for it, so its form is checked."""
    bits = figures.get(what)
    if bits is None:
        return float("nan")
    try:
        return float(canonical.from_bits(bits))
    except (ValueError, TypeError):
        raise _fault(what, bits, step) from None


def _rim(figures: Mapping[str, Any], step: int) -> float:
    codes, elements = figures.get("codes_at_rim"), figures.get("elements")
    if codes is None:
        return float("nan")
    if type(codes) is not int or type(elements) is not int or not 0 <= codes <= elements or not elements:
        raise _fault("codes_at_rim", f"{codes!r} of {elements!r}", step)
    return codes / elements


def _fault(what: str, found: object, step: int) -> InputFault:
    return InputFault(
        f"{diagnostics_key(step)}: {what} is {str(found)[:80]!r}, which is no such figure",
        cause="the file was damaged or edited; no digest but the release's list covers it",
    )
