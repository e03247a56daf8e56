"""The child processes of `tasks.train`: one segment of training, reported step by step. They import no Prefect."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from model.ranks import Parted, Ranks, launched, started_by_torchrun
from storage.engine import load_backend, self_test
from storage.run import open_run
from storage.store import open_store
from storage.stream import Stream
from storage.team import SOLO, Led, follow, idle_turns
from storage.training import StepProgress, stop_on_signal, train_segment
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
        launched(request["backend"]) as rank,
    ):
        if ranks:
            end_with_parent()
        if rank == 0:
            _train(request, should_stop)
            return
        try:
            follow(request["backend"])
        except Parted as error:
            sys.exit(f"rank {rank} ends, since another did: {error}")


def _train(request: dict[str, Any], should_stop: Callable[[], bool]) -> None:
    run = open_run(open_store(request["run"]), Stream.open(open_store(request["mix"])))
    emit("check", done=len(run.ledger), note=idle_turns(run.spec, request["processes"]))
    self_test(request["backend"])  # a machine that computes wrongly must not write a ledger
    team = SOLO if request["processes"] == 1 else Led(Ranks(load_backend(request["backend"]), run.spec.model))
    result = train_segment(
        run,
        request["backend"],
        request["until"],
        checkpoint_every=request["checkpoint_every"],
        diagnostics_every=request["diagnostics_every"],
        report=_report,
        should_stop=should_stop,
        team=team,
    )
    emit("result", **dataclasses.asdict(result))


def _report(progress: StepProgress) -> None:
    fields = dataclasses.asdict(progress)
    emit("step", **fields | {"loss": None if progress.loss is None else float(progress.loss)})


if __name__ == "__main__":
    main()
