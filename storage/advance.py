"""One step of a run. Training, restart validation and audit all come through here: there is no second way to do it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from model import schedule
from model.memory import KEEP_ALL, MemoryPlan
from storage import engine
from storage.beside import StepDigests
from storage.engine import State, StepRecord
from storage.ledger import Entry
from storage.run import Run
from storage.team import SOLO, Team

Take = Callable[[dict[str, np.ndarray]], None]  # is lent the summed int64 gradient of each parameter


@dataclass(frozen=True)
class Advanced:
    """One finished step: its ledger entry, the digests beside it, and all that the model reports of it."""

    entry: Entry
    digests: StepDigests
    record: StepRecord


def advance(
    run: Run,
    backend: ModuleType,
    state: State,
    diagnose: bool = False,
    take: Take | None = None,
    memory: MemoryPlan = KEEP_ALL,
    team: Team = SOLO,
) -> Advanced:
    """Do the step that `state` stands before; `state` becomes the state after it. Compares and writes nothing.

    The windows are verified as they are read.
    """
    number = state.step
    plan = schedule.plan(run.spec, number)
    windows = run.stream.windows(plan.first_window, plan.windows)
    batch = run.stream.batch_digest(plan.first_window, plan.windows)
    with team.doing("step", windows, diagnose):
        record = engine.step(
            run.spec, backend, state, windows, diagnose=diagnose, take=take, memory=memory, group=team.group
        )
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
        event=record.event,  # type: ignore[arg-type]  # one of the four, or pydantic refuses it
        clipped=record.clipped,
        previous=run.ledger.link(number),
    )
    digests = StepDigests(step=number, scalars=state.scalars(), tensors=record.tensors, gradient=record.gradients)
    return Advanced(entry, digests, record)
