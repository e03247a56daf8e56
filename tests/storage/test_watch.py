"""Ranks that hang are found by those that wait for them, and by nobody else; time here is counted, not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from model.stage import Stage
from storage import processes, watch
from storage.segment import RankTime, slow, told_slow
from storage.watch import FIRST, LEAST, TIMES, Pulse, Watch, allowed


class Desk(dict[int, Pulse]):
    """Pulses in this process."""

    def tell(self, rank: int, pulse: Pulse) -> None:
        self[rank] = pulse

    def heard(self, rank: int) -> Pulse | None:
        return self.get(rank)


class World:
    """Ranks whose watches tick in turn."""

    def __init__(self, size: int) -> None:
        self.desk, self.stages = Desk(), [Stage() for _ in range(size)]
        self.given_up: list[str] = []
        self.watches = [
            Watch(rank, size, self.desk, self.given_up.append, stage) for rank, stage in enumerate(self.stages)
        ]
        for stage in self.stages:
            stage.paces, stage.work, stage.windows = {"step": 0.5}, "step", 2

    def ticks(self, seconds: float, asleep: tuple[int, ...] = ()) -> dict[int, list[int]]:
        """After so many seconds: who found whom missing."""
        found: dict[int, list[int]] = {}
        for _ in range(int(seconds)):
            for rank, one in enumerate(self.watches):
                if rank not in asleep and rank not in found and (missing := one.tick()):
                    found[rank] = list(missing)
        return found

    def wait(self, *ranks: int) -> None:
        for rank in ranks:
            self.stages[rank].waiting, self.stages[rank].meetings = True, self.stages[rank].meetings + 1


def test_a_wait_may_take_ten_times_the_slowest_step_and_longer_before_one_is_known() -> None:
    stage = Stage()
    assert allowed(stage) == FIRST
    with stage.working("step", 4):
        assert allowed(stage) == FIRST
    stage.paces["step"] = 5.0  # seconds a window
    assert allowed(stage) == TIMES * 5 * 4
    stage.work, stage.windows = "step", 8
    assert allowed(stage) == TIMES * 5 * 8
    stage.work = "evaluate"
    assert allowed(stage) == FIRST
    stage.work, stage.paces = "", {"step": 0.01, "evaluate": 0.02}
    assert allowed(stage) == LEAST


@pytest.mark.parametrize("rank", [1, 2])
def test_a_silent_rank_is_found_by_rank_zero(rank: int) -> None:
    world = World(3)
    world.ticks(5)
    assert world.ticks(LEAST, asleep=(rank,)) == {}
    assert world.ticks(2, asleep=(rank,)) == {0: [rank]}
    text = f"rank {rank} (process {os.getpid()}) is silent for 31 s in its step; allowed are 30 s"
    assert world.stages[0].missing == text


def test_rank_zero_is_found_by_all_others() -> None:
    world = World(3)
    world.ticks(5)
    assert world.ticks(LEAST + 2, asleep=(0,)) == {1: [0], 2: [0]}


def test_a_rank_that_works_while_all_others_wait_is_late() -> None:
    world = World(4)
    world.wait(0, 1, 3)
    assert world.ticks(LEAST + 1) == {}
    assert world.ticks(2) == {0: [2]}
    assert "rank 2" in world.stages[0].missing and "s late in its step" in world.stages[0].missing


def test_rank_zero_late_in_a_step_is_found_but_may_save_for_as_long_as_it_likes() -> None:
    world = World(3)
    world.wait(1, 2)
    for rank in (0, 1, 2):
        world.stages[rank].work = ""
    assert world.ticks(20 * LEAST) == {}
    world.stages[0].work = "step"
    assert world.ticks(LEAST + 3) == {1: [0], 2: [0]}


def test_rank_zero_that_failed_in_a_step_may_end_a_save_though_others_wait_in_the_step() -> None:
    """Else they would end it within a minute, and the checkpoint in flight would be lost with it."""
    world = World(3)
    world.wait(1, 2)
    with pytest.raises(ValueError), world.stages[0].working("step", 2):
        raise ValueError
    assert world.stages[0].torn and world.ticks(20 * LEAST) == {}


def test_where_all_work_or_all_come_to_the_next_exchange_nobody_is_missing() -> None:
    world = World(3)
    assert world.ticks(20 * LEAST) == {}  # a long step of everybody
    for _ in range(20):
        world.wait(0, 1, 2)
        assert world.ticks(LEAST - 1) == {}


@pytest.mark.parametrize("moving", [0, 1])
def test_where_either_side_goes_on_nobody_is_missing(moving: int) -> None:
    world = World(2)
    world.wait(0)
    for _ in range(20):
        assert world.ticks(LEAST - 1) == {}
        world.stages[moving].meetings += 1


def test_an_exchange_that_does_not_end_is_found_by_rank_zero() -> None:
    world = World(3)
    world.wait(0, 1, 2)
    assert world.ticks(LEAST + 3) == {0: [1, 2]}
    assert "one exchange that does not end" in world.stages[0].missing


def test_a_rank_that_has_done_its_part_is_not_missed() -> None:
    world = World(3)
    world.ticks(3)
    world.watches[2].over()
    assert world.ticks(20 * LEAST, asleep=(2,)) == {}


def test_ranks_that_never_come_are_missed_after_the_first_limit() -> None:
    world = World(2)
    world.stages[0].paces, world.stages[0].work = {}, ""
    assert world.ticks(FIRST, asleep=(1,)) == {}
    assert world.ticks(1, asleep=(1,)) == {0: [1]}
    assert "rank 1 (process unknown) is silent for 901 s from the start" in world.stages[0].missing


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen(["sleep", "100"])
    os.kill(process.pid, signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


def threaded(world: World, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Rank 0's watch in its thread, in a hurry, from when its main thread waits for rank 1, which sleeps."""
    monkeypatch.setattr(watch, "SECOND", 0.001)
    monkeypatch.setattr(watch, "LEAST", 0.02)
    world.stages[0].paces = {"step": 0.0}
    thread = threading.Thread(target=world.watches[0].watch)
    thread.start()
    then()
    thread.join(20)
    assert not thread.is_alive()


def test_a_missing_process_of_this_machine_is_ended(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, victim = World(2), processes.process(sleeper.pid)
    assert victim
    world.ticks(1)
    world.desk[1] |= {"machine": processes.machine(), "process": [victim.document()]}
    world.wait(0)

    monkeypatch.setattr(watch, "GRACE", 10_000)

    def main() -> None:  # gets an error where it waits
        assert sleeper.wait(20) == -signal.SIGKILL
        world.stages[0].waiting = False
        world.watches[0].over()

    threaded(world, monkeypatch, main)
    assert world.given_up == [] and world.stages[0].missing


def test_a_rank_that_has_ended_is_named_where_another_gets_an_error(sleeper: Any) -> None:
    world, victim = World(3), processes.process(sleeper.pid)
    assert victim
    world.ticks(2)
    world.desk[2] |= {"process": [victim.document()]}
    world.watches[0].tick()
    assert world.stages[0].ended() == ""
    sleeper.kill()
    assert world.stages[0].ended() == f"rank 2 (process {victim.pid}) has ended"


def test_one_elsewhere_ends_this_process_where_it_waits(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, victim = World(2), processes.process(sleeper.pid)
    assert victim
    world.ticks(1)
    world.desk[1] |= {"machine": "another", "process": [victim.document()]}
    world.wait(0)
    threaded(world, monkeypatch, lambda: None)
    assert world.given_up == [world.stages[0].missing] and sleeper.poll() is None


def test_a_launcher_that_does_not_answer_says_nothing_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    answers: list[None] = []

    def fail(rank: int, pulse: Pulse) -> None:
        answers.append(None)
        if len(answers) > 200:
            world.watches[0].over()
        raise RuntimeError("timed out")

    monkeypatch.setattr(world.desk, "tell", fail)
    threaded(world, monkeypatch, lambda: None)
    assert world.stages[0].missing == ""


def test_the_time_of_a_step_is_told_apart_from_waiting_in_it() -> None:
    stage = Stage()
    for _ in range(2):
        with stage.working("step", 2), stage.meeting():
            pass
    assert stage.meetings == 2 and not stage.waiting and 0 < stage.waited < 1 and 0 < stage.worked < 1
    other = threading.Thread(target=lambda: stage.meeting().__enter__())
    other.start()
    other.join()
    assert stage.meetings == 2 and not stage.waiting


def times(*paces: tuple[int, int]) -> list[RankTime]:
    return [RankTime(units=units, worked_ms=worked, waited_ms=0) for units, worked in paces]


def test_a_rank_is_slow_by_the_work_that_it_had() -> None:
    assert slow([]) is None and slow(times((0, 0))) is None
    assert slow(times((4, 400), (4, 600), (4, 410))) is None
    assert slow(times((4, 400), (4, 640), (4, 410))) == 1
    assert slow(times((8, 800), (4, 410), (4, 430))) is None  # it had twice the units
    assert slow(times((4, 400), (4, 700))) == 1 and slow(times((4, 400), (0, 700))) is None
    said = told_slow(times((4, 400), (4, 640), (4, 410)))
    assert said == "rank 1 is slow: 160 ms of work a unit, the median of 3 ranks is 102 ms; the others wait for it"
    assert told_slow(times((4, 400), (4, 400))) == ""
