"""Spike protocol: which updates are skipped, and when the run halts.

A fresh event skips this step's update and the next `cooldown` ones (4, so 5 in all); a trigger during the cooldown is
absorbed. Tokens, learning-rate clock and ledger go on regardless. `halt_events` fresh events within `halt_within` steps
halt the run. Source: OPEN-1B, arXiv 2609.17380; here the decision uses the global norm, never a rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from model.host import f32
from model.spec import SpikeSpec

Event = Literal["", "spike", "nonfinite", "cooldown"]
NORM_LIMIT = np.float32(2.0**14)  # beyond it clipping leaves the contract's range: an event at any step


@dataclass(frozen=True)
class SpikeState:
    """Updates still to skip, and the steps of the fresh events that can still count towards a halt."""

    cooldown: int = 0
    events: tuple[int, ...] = ()

    def scalars(self) -> dict[str, Any]:
        """Form for canonical JSON."""
        return {"cooldown": self.cooldown, "events": list(self.events)}

    @classmethod
    def of(cls, scalars: Mapping[str, Any]) -> SpikeState:
        """Inverse of scalars(); raises ValueError for another shape."""
        if set(scalars) != {"cooldown", "events"}:
            raise ValueError(f"spike state has fields {sorted(scalars)}; expected ['cooldown', 'events']")
        return cls(int(scalars["cooldown"]), tuple(int(step) for step in scalars["events"]))


def _trigger(spec: SpikeSpec, step: int, norm: np.float32 | None) -> Event:
    if norm is None or not np.isfinite(norm):
        return "nonfinite"
    if norm > NORM_LIMIT or (step >= spec.from_step and norm > f32(spec.norm)):
        return "spike"
    return ""


def decide(spec: SpikeSpec, state: SpikeState, step: int, norm: np.float32 | None) -> tuple[SpikeState, Event, bool]:
    """(state after the step, event, halt). norm: float32 pre-clip global norm, None where the step is not finite.

    The update is skipped exactly where the event is not "". halt is only true at a fresh event.
    """
    if state.cooldown > 0:
        return SpikeState(state.cooldown - 1, _recent(spec, state.events, step)), "cooldown", False
    event = _trigger(spec, step, norm)
    if not event:
        return SpikeState(0, _recent(spec, state.events, step)), "", False
    counted = [earlier for earlier in state.events if step - earlier < spec.halt_within] + [step]
    halt = len(counted) >= spec.halt_events
    return SpikeState(spec.cooldown, _recent(spec, tuple(counted), step)), event, halt


def _recent(spec: SpikeSpec, events: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Events that a trigger at the next step would still count; older ones are no part of the state."""
    return tuple(earlier for earlier in events if step + 1 - earlier < spec.halt_within)
