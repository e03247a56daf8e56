"""One audit in plain Python, without Prefect: what `verbatim audit` calls, and the child process of `tasks.audit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.audit.certificate import save_certificate
from storage.audit.draw import Draw
from storage.audit.kept import find_draw
from storage.audit.keys import load_or_create_key
from storage.audit.replay import audit_initial, audit_step
from storage.audit.verdict import AuditProgress, Report, Verdict
from storage.errors import StorageError
from storage.ledger import Ledger
from storage.mirrors import open_copies
from storage.store import Store, open_store
from tasks.process import emit, reporting


def audit(
    store: str,
    step: int | None,
    draw: str,
    backend: str,
    records: str,
    keys: str,
    report: Report,
    mirrors: Sequence[str] = (),
) -> dict[str, Any]:
    """Audit one step of a release, or its initial state where `step` is None; keep the certificate in `records`.

    draw: date of the recorded draw that chose the step, "" for none. mirrors: further copies of the release, for what
    is bad in `store`. Returns the verdict's document, with `step` and `certificate` (the file's address, None without
    one).
    """
    release, kept = open_copies([store, *mirrors]), open_store(records)
    key = load_or_create_key(Path(keys), "auditor")
    if step is None:
        verdict = audit_initial(release, backend, key, report)
    else:
        verdict = audit_step(release, step, backend, key, _draw(release, kept, draw), report, kept)
    return verdict.document() | {"step": step, "certificate": saved(records, kept, verdict)}


def saved(folder: str, records: Store, verdict: Verdict) -> str | None:
    """Where in `folder`, the address of the store `records`, the verdict's certificate now lies; None without one.

    A verdict is not lost where it cannot be kept.
    """
    if verdict.certificate is None:
        return None
    try:
        return f"{folder}/{save_certificate(records, verdict.certificate)}"
    except StorageError as error:
        raise StorageError(
            f"{verdict.piece}: {verdict.outcome.label}, but its certificate was not kept: {error.message}",
            cause=error.cause,
            next_step="choose another folder (--records) and audit again",
        ) from error


def _draw(release: Store, records: Store, date: str) -> Draw | None:
    return find_draw(release, records, Ledger(release), date) if date else None


def main() -> None:
    """The child process: reports each stage, then the verdict."""
    with reporting() as request:
        emit("result", **audit(**request, report=tell_stage))


def tell_stage(progress: AuditProgress) -> None:
    """An event of the child process, for whoever started it."""
    emit("stage", stage=progress.stage, step=progress.step, done=progress.done, of=progress.of)


if __name__ == "__main__":
    main()
