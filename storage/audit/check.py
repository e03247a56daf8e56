"""Cheap checks of every step, without replaying: does each entry say what the spec and the mix demand?

They find a ledger that claims other windows, rates, token counts or spike decisions than its own header implies. They
never count as an audit: a loss or a state root can only be judged by replay.
"""

from typing import Any

from kernels import canonical
from model import schedule, spike
from model.spike import SpikeState
from storage import engine
from storage.errors import Divergence
from storage.ledger import Entry
from storage.run import Run


def check_entries(run: Run) -> None:
    """Check all entries in order; Divergence names the first step and field that cannot be."""
    state, halt = SpikeState(), False
    for entry in run.ledger:
        if entry.step >= run.steps:
            raise Divergence(f"the ledger holds an entry of step {entry.step}, the run has {run.steps} steps")
        if halt:
            raise Divergence(f"the spike protocol halts the run at step {entry.step - 1}, but the ledger goes on")
        _check_plan(run, entry)
        state, halt = _check_protocol(run, state, entry)


def _check_plan(run: Run, entry: Entry) -> None:
    plan = schedule.plan(run.spec, entry.step)
    _require(entry, "tokens", entry.tokens, plan.tokens_after)
    _require(entry, "first_window", entry.first_window, plan.first_window)
    _require(entry, "windows", entry.windows, plan.windows)
    _require(entry, "lr", entry.lr, canonical.bits(schedule.learning_rate(run.spec, plan.tokens_before)))
    _require(entry, "batch", entry.batch, run.stream.batch_digest(plan.first_window, plan.windows))


def _check_protocol(run: Run, state: SpikeState, entry: Entry) -> tuple[SpikeState, bool]:
    """(state of the spike protocol after this entry, whether it halts the run), from its gradient norm alone."""
    void = entry.grad_norm is None
    for name in ("loss", "z_loss", "gradient"):
        if (getattr(entry, name) is None) != void:
            raise Divergence(
                f"entry {entry.step}: {name} is {getattr(entry, name)}, but grad_norm is {entry.grad_norm}: "
                "a step is void in all of them or in none",
                step=entry.step,
                fields=(name,),
            )
    norm = None if entry.grad_norm is None else canonical.from_bits(entry.grad_norm)
    state, event, halt = spike.decide(run.spec.spike, state, entry.step, norm)
    _require(entry, "event", entry.event, event)
    clipped = not event and norm is not None and engine.clip_factor(run.spec, norm) < 1
    _require(entry, "clipped", entry.clipped, bool(clipped))
    return state, halt


def _require(entry: Entry, field: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Divergence(
            f"entry {entry.step}: {field} is {found}, but spec and mix demand {expected}",
            cause="the ledger was made by another program than its header says, or it was edited and linked anew",
            next_step="do not rely on this run; ask its publisher",
            step=entry.step,
            fields=(field,),
        )
