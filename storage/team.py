"""Who trains a segment: one process, or rank 0 with others that follow it.

    rank 0     trains as one process would, alone touches ledger and store, and says what all ranks do next
    others     wait for what is said: a step, an evaluation, the state's rows for a checkpoint, the end

Rows for a checkpoint are copied when it is said and told in a thread, while the steps go on.

A rank that dies breaks the connection that the others wait at, so each of them ends too, and rank 0 with the reason.
One that hangs is found and ended by those that wait (watch.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Literal

import numpy as np

from model.group import ALONE, Group
from model.memory import MemoryPlan
from model.ranks import Parted, Ranks, dealt, told
from model.rows import idle
from model.spec import RunSpec
from model.stage import STAGE
from storage import engine
from storage.engine import State
from storage.errors import RankLost
from storage.saving import Saver
from storage.segment import RankTime

Work = Literal["step", "evaluate", "save", "times"]


class Team:
    """One process: there is nobody to tell."""

    group: Group = ALONE

    @contextmanager
    def doing(self, work: Work, windows: np.ndarray | None = None, diagnose: bool = False) -> Iterator[None]:
        """Around a work that all ranks do, on these windows: they are told of it."""
        yield

    def times(self) -> list[RankTime]:
        """What each of several ranks worked and waited in the steps of this segment; none of one process."""
        return []

    def spread(self, backend: ModuleType, state: State) -> State:
        """The rows of a state on the host that this rank owns, where the backend works."""
        return state.placed(backend.to_device)

    def whole(self, backend: ModuleType, state: State) -> State:
        """The whole state on the host; the others have been told to save."""
        return state.placed(backend.to_host)

    @contextmanager
    def led(self, spec: RunSpec, memory: MemoryPlan) -> Iterator[None]:
        """Around a segment's work: the others begin to follow, and are sent home after it."""
        yield


SOLO = Team()


class Led(Team):
    """Rank 0 of several."""

    def __init__(self, group: Ranks) -> None:
        self.group = self.ranks = group

    @contextmanager
    def doing(self, work: Work, windows: np.ndarray | None = None, diagnose: bool = False) -> Iterator[None]:
        """Say what all ranks do next, and on which windows; then it is done here too."""
        told({"work": work, "diagnose": diagnose})
        if windows is not None:
            dealt(windows, _unit(self.spec, work))
        if work == "save":  # rank 0 may write in place, for as long as the disk takes: nobody is to miss it
            yield
            return
        with STAGE.working(work, 1 if windows is None else len(windows)):
            yield

    def times(self) -> list[RankTime]:
        """Of all ranks."""
        with self.doing("times"):
            return _times(self.ranks)

    def spread(self, backend: ModuleType, state: State) -> State:
        """This rank's own rows; the others get theirs."""
        return self.ranks.scattered(state)

    def whole(self, backend: ModuleType, state: State) -> State:
        """The whole state, from the rows of all."""
        whole = self.ranks.gathered(state)
        assert whole is not None  # this is rank 0
        return whole

    @contextmanager
    def led(self, spec: RunSpec, memory: MemoryPlan) -> Iterator[None]:
        """RankLost where a rank ended before; however this ends, the others do too."""
        self.spec = spec
        try:
            told({"spec": spec.canonical(), "memory": dataclasses.asdict(memory)})
            yield
            told({"work": "end"})
        except Parted as error:
            raise lost(self.group.size, error) from None
        except BaseException:
            # Within a work the others wait for something else; they see that this rank ends.
            with suppress(Parted):
                if not STAGE.torn:
                    told({"work": "end"})
            raise


def lost(size: int, error: Parted) -> RankLost:
    """What ends a segment of `size` processes of which one has ended, or was ended since it did not go on."""
    if STAGE.missing:
        return RankLost(
            f"not all of the segment's {size} processes go on: {error}",
            cause="the process was stopped, or its device or disk does not answer",
            next_step="train again: it goes on from the newest whole checkpoint",
        )
    return RankLost(
        f"another of the segment's {size} processes ended before its work was done: {error}",
        cause="it was killed, the system ran out of memory, or it failed: its own words are above",
        next_step="train again: it goes on from the newest whole checkpoint",
    )


def _times(group: Ranks) -> list[RankTime]:
    row = [0] * (3 * group.size)
    row[3 * group.rank : 3 * group.rank + 3] = STAGE.units, round(1e3 * STAGE.worked), round(1e3 * STAGE.waited)
    found = group.total(*row)
    each = zip(found[::3], found[1::3], found[2::3])
    return [RankTime(units=units, worked_ms=worked, waited_ms=waited) for units, worked, waited in each]


def _unit(spec: RunSpec, work: Work) -> int:
    """Windows of which a rank takes all or none."""
    return spec.numerics.unit_windows if work == "step" else 1


def follow(backend_name: str) -> None:
    """Be a rank other than 0: do what rank 0 says until it says that this is the end. Parted where another ended."""
    begin = told()
    spec, memory = RunSpec.model_validate(begin["spec"]), MemoryPlan(**begin["memory"])
    backend = engine.load_backend(backend_name)
    group = Ranks(backend, spec.model)
    state = group.scattered(None)
    with Saver(group.gathered, memory.copy_state) as saver:
        while (order := told())["work"] != "end":
            saver.check()
            if order["work"] in ("save", "times"):
                with STAGE.working(order["work"]):
                    saver.save(state) if order["work"] == "save" else _times(group)
                continue
            windows = dealt(None, _unit(spec, order["work"]))
            with STAGE.working(order["work"], len(windows)):
                if order["work"] == "step":
                    engine.step(spec, backend, state, windows, diagnose=order["diagnose"], memory=memory, group=group)
                else:
                    engine.evaluate(spec, backend, state, windows, memory, group)


def idle_turns(spec: RunSpec, size: int) -> str:
    """What ranks have nothing to do, by phases of the batch plan; "" where all always have."""
    found = []
    for phase in spec.schedule.phases:
        units = -(-phase.windows // spec.numerics.unit_windows)
        if unused := idle(units, size):
            found.append(f"{unused} of {units + unused} turns of a step of {units} units")
    return f"{size} processes idle in {'; '.join(found)}" if found else ""
