"""Training: one segment of a run, from its newest whole checkpoint to a step, in this process.

    newest checkpoint ─▶ repeat the steps that the ledger already has, compare each ─▶ new steps ─▶ … ─▶ checkpoint

There is one loop. Whether a step is new or repeated is decided by the ledger when the step is recorded. Checkpoints are
written beside it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from kernels import canonical
from model.memory import MemoryPlan
from model.state import root
from storage import checkpoint, engine, figures, segment
from storage.advance import Advanced, advance
from storage.beside import differing_tensors, save_digests
from storage.engine import State
from storage.errors import Divergence, Halted, StorageError, UsageError
from storage.memory import moments, plan_for
from storage.provenance import provenance
from storage.run import Run
from storage.saving import Saver
from storage.segment import Outcome
from storage.team import SOLO, Team


@dataclass(frozen=True)
class StepProgress:
    """Reported after each step. loss in nats, None where not finite; times in seconds, measured in this segment."""

    step: int
    until: int  # the segment ends before this step
    steps: int  # of the whole run
    loss: np.float32 | None
    event: str
    validated: bool  # the ledger had this step already, and it came out equal
    seconds_per_step: float
    seconds_left: float


@dataclass(frozen=True)
class SegmentResult:
    """Steps first_step … last_step − 1 ran in this segment; `validated` are those that were compared, not new."""

    segment: str
    first_step: int
    last_step: int
    validated: tuple[int, ...]
    outcome: Outcome
    head: str
    seconds: float
    slow: str  # of which rank the others had to wait for; "" of none


Report = Callable[[StepProgress], None]


def train_segment(
    run: Run,
    backend_name: str,
    until: int | None = None,
    *,
    checkpoint_every: int,
    diagnostics_every: int,
    report: Report = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team = SOLO,
) -> SegmentResult:
    """Train until step `until` (the end of the run if None), or until `should_stop()` is true between two steps. Of a
    team this is its rank 0; the others follow().

    Whole checkpoints are made at every checkpoint_every steps, at the end of the segment and when stopped. Raises
    Refused if this machine's memory is too small or the run's reduction needs another number of processes, Divergence
    if a repeated step differs from the ledger, Halted where the spike protocol halts, RankLost if another rank ended,
    CheckpointFault if the newest checkpoint is damaged, StorageError. Whatever it raises, what is in the store is
    whole.
    """
    end = run.steps if until is None else min(until, run.steps)
    if end < 0 or checkpoint_every < 1 or diagnostics_every < 1:
        raise UsageError(f"until {until}, checkpoint_every {checkpoint_every}, diagnostics_every {diagnostics_every}")
    engine.check_arithmetic(run.spec, team.group.size)
    backend = engine.load_backend(backend_name)
    memory = plan_for(run.spec, "training", backend.device_memory(), team.group.size)
    began, state = time.monotonic(), resume(run, backend, memory)
    work = _Segment(run, backend, state, end, checkpoint_every, diagnostics_every, report, memory, team)
    del state  # the work alone holds it, and lets it go once it lies where the backend works
    first, made_by = work.done, provenance(backend_name)
    record = segment.begin(run.store, run.ledger.run_id, first, len(run.ledger), end, made_by, team.group.size)
    try:
        with team.led(run.spec, memory):
            outcome = work.train(should_stop)
            times = team.times()
    except BaseException as error:
        kind: Outcome = "halted" if isinstance(error, Halted) else "failed"
        kind = "diverged" if isinstance(error, Divergence) else kind
        with suppress(StorageError):  # a full disk must not hide what was wrong first
            segment.end(run.store, record, work.done, len(work.validated), kind, str(error) or type(error).__name__)
        raise
    segment.end(run.store, record, work.done, len(work.validated), outcome, ranks=times)
    return SegmentResult(
        segment=record.segment,
        first_step=first,
        last_step=work.done,
        validated=tuple(work.validated),
        outcome=outcome,
        head=run.ledger.head,
        seconds=time.monotonic() - began,
        slow=segment.told_slow(times),
    )


def resume(run: Run, backend: ModuleType, memory: MemoryPlan) -> State:
    """The state of the newest whole checkpoint, or state 0 from the seed; verified against the ledger either way."""
    made, place = checkpoint.steps(run.store), moments(run.spec, memory, run.store)
    run.ledger.catch_up()  # a twin may train the same run: the entries up to every checkpoint listed are there by now
    if made:
        return checkpoint.load(run.store, run.ledger, made[-1], place)
    state = engine.initial_state(run.spec, backend, place)
    found, recorded = root(state)[0], run.ledger.header.initial_root
    if found != recorded:
        raise Divergence(
            f"the initial weights drawn here have root {found}, the run's header says {recorded}",
            cause="another code, or a faulty machine",
            next_step="verbatim doctor",
        )
    return state


@contextmanager
def stop_on_signal(second_ends: bool = True) -> Iterator[Callable[[], bool]]:
    """Yields should_stop: true after the first SIGTERM or Ctrl-C. A second one ends the process at once; not where a
    launcher asks, which may do so more than once."""
    stopping = threading.Event()
    previous: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        if second_ends:
            signal.signal(number, previous[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, stop)
    try:
        yield stopping.is_set
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


class _Segment:
    """The loop and what it has done so far."""

    def __init__(
        self,
        run: Run,
        backend: ModuleType,
        state: State,
        end: int,
        checkpoint_every: int,
        diagnostics_every: int,
        report: Report,
        memory: MemoryPlan,
        team: Team,
    ) -> None:
        self.run, self.backend, self.state, self.end, self.team = run, backend, state, end, team
        self.checkpoint_every, self.diagnostics_every, self.report = checkpoint_every, diagnostics_every, report
        self.memory = memory
        self.saver = Saver(self._write, memory.copy_state)
        self.zero_watch = figures.ZeroWatch(run)
        self.done = state.step
        self.validated: list[int] = []
        self.seconds = 0.0

    def train(self, should_stop: Callable[[], bool]) -> Outcome:
        """Run to the end or until asked to stop; leaves a checkpoint there, whole."""
        with self.saver:
            self._train(should_stop)
        if self.state.step < self.end:
            return "stopped"
        return "finished" if self.state.step == self.run.steps else "paused"

    def _train(self, should_stop: Callable[[], bool]) -> None:
        self.state = self.team.spread(self.backend, self.state)
        first = saved = self.state.step
        if first in checkpoint.steps(self.run.store):
            # The segment before may have died just short of it.
            figures.save_probe(self.run, self.backend, self.state, self.memory, self.team)
        else:
            self._checkpoint()
        while self.state.step < self.end and not should_stop():
            self.saver.check()
            self._step(first)
            if self.state.step % self.checkpoint_every == 0 or self.state.step == self.end:
                self._checkpoint()
                saved = self.state.step
        if saved < self.state.step:
            self._checkpoint()

    def _step(self, first: int) -> None:
        began, number = time.monotonic(), self.state.step
        diagnose = number % self.diagnostics_every == 0
        done = advance(self.run, self.backend, self.state, diagnose, memory=self.memory, team=self.team)
        new = self._record(done)
        save_digests(self.run.store, done.digests)
        figures.save_diagnostics(self.run, done.record)
        self.done = number + 1
        if not new:
            self.validated.append(number)
        self.seconds += time.monotonic() - began
        self._report(done, first, new)
        self.zero_watch.see(done.record)
        if done.record.halt:
            raise Halted(
                f"the spike protocol halts the run at step {number}: {self.run.spec.spike.halt_events} spikes within "
                f"{self.run.spec.spike.halt_within} steps",
                cause="the learning rate is too high for this model, or the data at these steps is broken",
                next_step="look at the ledger and diagnostics, then begin another run with another recipe",
            )

    def _record(self, done: Advanced) -> bool:
        try:
            return self.run.ledger.record(done.entry)
        except Divergence as error:
            recorded = self.run.ledger[done.entry.step]
            tensors = differing_tensors(self.run.store, recorded, done.digests)
            named = f"; differing tensors: {', '.join(tensors[:8])}" if tensors else ""
            raise Divergence(
                error.message + named,
                cause=error.cause,
                next_step=error.next_step,
                step=error.step,
                fields=error.fields,
                tensors=tensors,
            ) from None

    def _checkpoint(self) -> None:
        self.saver.wait()
        with self.team.doing("save"):
            self.saver.save(self.state)
        figures.save_probe(self.run, self.backend, self.state, self.memory, self.team)

    def _write(self, state: State) -> None:
        checkpoint.save(self.run.store, self.run.ledger, self.team.whole(self.backend, state))

    def _report(self, done: Advanced, first: int, new: bool) -> None:
        pace = self.seconds / (self.done - first)
        loss = done.record.loss
        self.report(
            StepProgress(
                step=done.entry.step,
                until=self.end,
                steps=self.run.steps,
                loss=None if loss is None else canonical.from_bits(loss),
                event=done.entry.event,
                validated=not new,
                seconds_per_step=pace,
                seconds_left=pace * (self.end - self.done),
            )
        )
