"""Held-out losses in plain Python, without Prefect: for `verbatim evaluate`, and as the child of `tasks.evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage import checkpoint, engine
from storage.audit.held_out import audit_held_out
from storage.audit.keys import load_or_create_key
from storage.audit.verdict import Report
from storage.errors import Refused
from storage.figures import Probe, probe_key, save_probe
from storage.ledger import HEADER_KEY, Ledger
from storage.memory import plan_for
from storage.mirrors import open_copies
from storage.run import open_run
from storage.store import Store, open_store
from storage.stream import Stream
from storage.team import SOLO
from tasks.process import emit, reporting
from tasks.references import Places
from tasks.replay import saved, tell_stage


def check(
    store: str, step: int | None, backend: str, records: str, keys: str, report: Report, mirrors: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare the recorded held-out losses of state `step` of a release, the last one's for None, with what comes out
    here; keep the certificate in `records`.

    Returns the verdict's document, with `step` and `certificate` (the file's address, None without one).
    """
    release, kept = open_copies([store, *mirrors]), open_store(records)
    chosen = _last(release, store) if step is None else step
    verdict = audit_held_out(release, chosen, backend, load_or_create_key(Path(keys), "auditor"), report)
    return verdict.document() | {"step": chosen, "certificate": saved(records, kept, verdict)}


def make(folder: str, step: int | None, backend_name: str) -> list[Probe]:
    """The held-out losses of the checkpoints of the run in `folder` (run/, mix/), of one or of all; those that are not
    there yet are made. Refused where there is no such checkpoint, CheckpointFault where its root is not the ledger's.
    """
    where = Places.of(folder)
    run = open_run(open_store(where.run), Stream.open(open_store(where.mix)))
    made = [k for k in checkpoint.steps(run.store) if k <= len(run.ledger)]
    if not made or step not in (None, *made):
        raise Refused(
            f"{folder} has no checkpoint {'' if step is None else step}; it has {made or 'none'}",
            next_step="train first, or choose one of these",
        )
    engine.check_arithmetic(run.spec)
    engine.self_test(backend_name)
    backend, found = engine.load_backend(backend_name), []
    memory = plan_for(run.spec, "unit", backend.device_memory())
    for k in made if step is None else [step]:
        wanted = [f"weights/{name}" for name in run.spec.model.shapes()]
        state = checkpoint.load(run.store, run.ledger, k, wanted=wanted).placed(backend.to_device)
        found.append(save_probe(run, backend, state, memory, SOLO))
    return found


def is_folder_of_run(address: str) -> bool:
    """Whether there is a run with its mix beside it, as training leaves them."""
    return "://" not in address and (Path(address) / "run" / HEADER_KEY).exists()


def _last(release: Store, address: str) -> int:
    """The last state that has both a checkpoint and a record of its losses."""
    probes, steps = set(release.list("probe/")), len(Ledger(release))
    made = [k for k in checkpoint.steps(release) if k <= steps and probe_key(k) in probes]
    if not made:
        raise Refused(
            f"{address} records no held-out losses of a checkpoint: there is nothing to compare with",
            cause="it is no published run, or was published before its first checkpoint",
            next_step="check the address",
        )
    return made[-1]


def main() -> None:
    """The child process: reports each stage, then the verdict."""
    with reporting() as request:
        emit("result", **check(**request, report=tell_stage))


if __name__ == "__main__":
    main()
