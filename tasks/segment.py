"""The child process of `tasks.train`: one segment of training, reported step by step. It imports no Prefect."""

from __future__ import annotations

import dataclasses

from storage.engine import self_test
from storage.run import open_run
from storage.store import open_store
from storage.stream import Stream
from storage.training import StepProgress, stop_on_signal, train_segment
from tasks.process import emit, reporting


def main() -> None:
    """Train until the requested step; SIGTERM asks for a whole checkpoint at the next step boundary, then the end."""
    with reporting() as request, stop_on_signal() as should_stop:
        run = open_run(open_store(request["run"]), Stream.open(open_store(request["mix"])))
        emit("check", done=len(run.ledger))
        self_test(request["backend"])  # a machine that computes wrongly must not write a ledger
        result = train_segment(
            run,
            request["backend"],
            request["until"],
            checkpoint_every=request["checkpoint_every"],
            diagnostics_every=request["diagnostics_every"],
            report=_report,
            should_stop=should_stop,
        )
        emit("result", **dataclasses.asdict(result))


def _report(progress: StepProgress) -> None:
    fields = dataclasses.asdict(progress)
    emit("step", **fields | {"loss": None if progress.loss is None else float(progress.loss)})


if __name__ == "__main__":
    main()
