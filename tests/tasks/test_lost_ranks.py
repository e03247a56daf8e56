"""Ranks that stop, hang or are slow, in earnest: the segment ends and says which; a second trainer is told."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from storage import checkpoint
from storage.lease import Holder, held
from tasks.process import ChildFailed, ChildKilled, Event
from tests.storage import small
from tests.tasks.test_process import gone
from tests.tasks.test_segment import Trainer, begin

NONE: Event = {"rank": None, "kind": ""}


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    begin(tmp_path)
    return Trainer(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_segment_and_is_named(trainer: Trainer, rank: int) -> None:
    struck: list[Any] = []

    def stop(launcher: int, ranks: list[int]) -> None:
        os.kill(ranks[rank], signal.SIGSTOP)
        struck.extend([time.monotonic(), ranks])

    with pytest.raises(ChildKilled, match=rf"rank {rank} \(process \d+\) is silent for \d+ s") as caught:
        trainer.train(2, at=2, act=stop, fault=NONE)
    assert f"process {struck[1][rank]}" in str(caught.value)
    assert time.monotonic() - struck[0] < 60 and all(map(gone, struck[1]))
    if rank:
        assert any(end.outcome == "failed" and f"rank {rank}" in end.reason for end in trainer.ends())
    assert trainer.train(2)["outcome"] == "finished"


@pytest.mark.slow
def test_a_rank_whose_step_does_not_end_is_named(trainer: Trainer) -> None:
    with pytest.raises(ChildKilled, match=r"rank 1 \(process \d+\) is \d+ s late in its step"):
        trainer.train(2, fault={"rank": 1, "kind": "stuck"})
    assert [(end.outcome, end.last_step) for end in trainer.ends()] == [("failed", 5)]
    assert len(trainer.run().ledger) == 5 and trainer.store.list("lease/") == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_within_a_step_ends_the_segment_with_its_error(trainer: Trainer, rank: int) -> None:
    with pytest.raises((ChildFailed, ChildKilled)) as caught:
        trainer.train(2, fault={"rank": rank, "kind": "fails"})
    (end,) = trainer.ends()
    reason = "another of the segment's 2 processes ended" if rank else "the device is out of order"
    assert end.outcome == "failed" and re.search(reason, end.reason)
    assert re.search(rf"ValueError: the device is out of order|{reason}", str(caught.value))


@pytest.mark.slow
def test_a_slow_rank_is_named(trainer: Trainer) -> None:
    done = trainer.train(2, fault={"rank": 1, "kind": "slow"})
    assert done["outcome"] == "finished" and done["slow"].startswith("rank 1 is slow: ")
    (end,) = trainer.ends()
    assert end.slow_rank == 1 and [rank.units for rank in end.ranks] == [15, 11]  # the first step's are left out
    assert end.ranks[1].worked_ms > 11 * 200 and end.ranks[0].waited_ms > 11 * 100
    assert trainer.store.list("lease/") == []


def test_a_second_trainer_is_told_who_trains(trainer: Trainer) -> None:
    with held(trainer.store, trainer.run().ledger.run_id, 0), pytest.raises(ChildFailed) as caught:
        trainer.train(1)
    assert caught.value.exit_code == 13
    assert f"this run is being trained by process {os.getpid()} on " in str(caught.value)
    assert len(trainer.run().ledger) == 0 and trainer.store.list("segments/") == []


def test_a_trainer_whose_run_was_taken_over_leaves_it_at_a_whole_checkpoint(trainer: Trainer) -> None:
    """It was asleep, say, for so long that its lease expired."""

    def take_over(launcher: int, ranks: list[int]) -> None:
        key = trainer.store.list("lease/")[-1]
        other = Holder.parse(trainer.store.read(key), key).model_copy(update={"token": "another", "host": "faraway"})
        assert trainer.store.create("lease/90000000.json", other.canonical())

    with pytest.raises(ChildFailed, match=r"trained by process \d+ on faraway, until") as caught:
        trainer.train(1, at=1, act=take_over, fault={"rank": 0, "kind": "slow"})
    assert caught.value.exit_code == 13
    (end,) = trainer.ends()
    assert end.outcome == "stopped" and 2 <= end.last_step == checkpoint.steps(trainer.store)[-1] < small.STEPS
    assert trainer.store.list("lease/") == ["lease/90000000.json"]
