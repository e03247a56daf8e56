"""The child processes of `tasks.train`: one segment of training, reported step by step. They import no Prefect."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from model.ranks import Parted, Ranks, launched, started_by_torchrun
from model.stage import STAGE
from storage.engine import load_backend, self_test
from storage.lease import held, refused
from storage.run import Run, open_run
from storage.store import open_store
from storage.stream import Stream
from storage.team import SOLO, Led, follow, idle_turns, lost
from storage.training import SegmentResult, StepProgress, stop_on_signal, train_segment
from storage.watch import watched
from tasks.leash import end_with_parent
from tasks.process import emit, reporting


def main() -> None:
    """Train until the requested step; SIGTERM asks for a whole checkpoint at the next step boundary, then the end.

    Started by torchrun this is one rank: 0 does so, the others do what it says.
    """
    ranks = started_by_torchrun()
    with (
        stop_on_signal(second_ends=not ranks) as should_stop,
        reporting() as request,
        _among(ranks, request["backend"]) as rank,
    ):
        if rank == 0:
            _lead(request, should_stop)
            return
        try:
            follow(request["backend"])
        except Parted as error:
            if STAGE.missing or STAGE.ended():  # rank 0, which then says nothing
                raise lost(request["processes"], error) from None
            sys.exit(f"rank {rank} ends, since another did: {error}")


@contextmanager
def _among(ranks: bool, backend: str) -> Iterator[int]:
    """This process alone, or as one rank, watched; yields its rank."""
    if not ranks:
        yield 0
        return
    end_with_parent()
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    with watched(rank, size, (os.environ["MASTER_ADDR"], port), _give_up), launched(backend):
        yield rank


def _give_up(reason: str) -> None:
    """Nothing else ends a wait for a process that cannot be ended from here."""
    error = lost(int(os.environ["WORLD_SIZE"]), Parted(reason))
    emit("error", message=str(error), exit_code=error.exit_code, killed=True)
    os._exit(1)


def _lead(request: dict[str, Any], should_stop: Callable[[], bool]) -> None:
    """Train as the run's only trainer, as far as others look; one that took it over meanwhile is left to it."""
    run = open_run(open_store(request["run"]), Stream.open(open_store(request["mix"])))
    parents = 2 if request["processes"] > 1 else 1  # torchrun's launcher, and who listens to these events
    with held(run.store, run.ledger.run_id, parents) as lease:
        result = _train(run, request, lambda: should_stop() or lease.lost is not None)
        if result.outcome == "stopped" and lease.lost:
            raise refused(run.store, lease.lost)
        emit("result", **dataclasses.asdict(result))


def _train(run: Run, request: dict[str, Any], should_stop: Callable[[], bool]) -> SegmentResult:
    known = {"done": len(run.ledger), "note": idle_turns(run.spec, request["processes"])}
    emit("check", **known, test="self-test, at first minutes")
    # A machine that computes wrongly must not write a ledger.
    self_test(request["backend"], lambda text: emit("check", **known, test=text))
    team = SOLO if request["processes"] == 1 else Led(Ranks(load_backend(request["backend"]), run.spec.model))
    return train_segment(
        run,
        request["backend"],
        request["until"],
        checkpoint_every=request["checkpoint_every"],
        diagnostics_every=request["diagnostics_every"],
        report=_report,
        should_stop=should_stop,
        team=team,
    )


def _report(progress: StepProgress) -> None:
    fields = dataclasses.asdict(progress)
    emit("step", **fields | {"loss": None if progress.loss is None else float(progress.loss)})


if __name__ == "__main__":
    main()
