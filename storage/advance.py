"""One step of a run. Training, restart validation and audit all come through here, so there is no second way to do it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

import kernels
from model import schedule
from model.spec import RunSpec
from model.state import State
from model.state import initial_state as _initial_state
from model.step import StepRecord
from model.step import evaluate as _evaluate
from model.step import step as _step
from storage.errors import MachineFault, UsageError
from storage.ledger import Entry
from storage.run import Run
from storage.beside import StepDigests

Take = Callable[[dict[str, np.ndarray]], None]  # is given the summed int64 gradient of each parameter


@dataclass(frozen=True)
class Advanced:
    """One finished step: its ledger entry, the digests beside it, and all that the model reports of it."""

    entry: Entry
    digests: StepDigests
    record: StepRecord


def load_backend(name: str) -> ModuleType:
    """The backend of that name; UsageError for another."""
    try:
        return kernels.backend(name)
    except (KeyError, ValueError) as error:
        raise UsageError(f"no backend {name!r}: {error}", next_step="use cpu or reference") from None


def self_test(name: str) -> None:
    """MachineFault unless this backend reproduces every conformance vector on this machine."""
    load_backend(name)
    if failing := kernels.self_test(name):
        raise MachineFault(
            f"backend {name} fails {len(failing)} conformance vectors here: {', '.join(failing[:5])}",
            cause="faulty memory or processor, or a dependency of another version",
            next_step="make install, then verbatim doctor; if it still fails, use another machine",
        )


def initial_state(spec: RunSpec, backend: ModuleType) -> State:
    """State 0, from the seed alone."""
    return _initial_state(spec, backend)


def advance(run: Run, backend: ModuleType, state: State, diagnose: bool = False, take: Take | None = None) -> Advanced:
    """Do the step that `state` stands before; `state` becomes the state after it. Compares and writes nothing.

    The windows are verified as they are read. `take` is given the step's gradient before it is dropped.
    """
    number = state.step
    plan = schedule.plan(run.spec, number)
    windows = run.stream.windows(plan.first_window, plan.windows)
    batch = run.stream.batch_digest(plan.first_window, plan.windows)
    record = _step(run.spec, backend, state, windows, diagnose=diagnose, take=take)
    entry = Entry(
        step=record.step,
        tokens=record.tokens,
        first_window=record.first_window,
        windows=record.windows,
        lr=record.lr,
        loss=record.loss,
        z_loss=record.z_loss,
        grad_norm=record.grad_norm,
        batch=batch,
        gradient=record.gradient,
        state=record.state,
        event=record.event,
        clipped=record.clipped,
        previous=run.ledger.link(number),
    )
    digests = StepDigests(step=number, scalars=state.scalars(), tensors=record.tensors, gradient=record.gradients)
    return Advanced(entry, digests, record)


def evaluate(run: Run, backend: ModuleType, state: State, windows: np.ndarray) -> str | None:
    """Mean negative log-likelihood of windows under the state's weights, as float bits; None where not finite."""
    return _evaluate(run.spec, backend, state, windows)
