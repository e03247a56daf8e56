"""The nightly sample: draw steps that nobody could predict, record the draw, then audit them."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow, tags
from prefect.runtime import flow_run

from flows.naming import named, short
from tasks.audit import AuditFailed, audit_step
from tasks.references import Audited, Backend, Count, absolute, records_of
from tasks.sample import draw_steps


@flow(flow_run_name=named("nightly sample of", "published"))
def nightly_sample(
    published: str = "runs/demo/published",
    count: Count = 1,
    backend: Backend = "cpu",
    records: str = "",
    beacon: str = "",
) -> list[Audited]:
    """Draw and audit `count` steps. One draw a night: started again, it audits the steps already drawn.

    Fails unless all of them match, after the last.

    Args:
        published: Folder or address that was published to, such as runs/demo/published.
        count: How many steps to draw.
        backend: cpu is fast, nvidia faster on an NVIDIA GPU, reference plain NumPy and slow. It changes no bit.
        records: Folder for this machine's draws and certificates. Empty: runs/audits.
        beacon: File with a public random value. Empty: one is drawn here, on our word alone.
    """
    # The scheduled date, not today's: a run that starts late still belongs to its own night.
    scheduled = flow_run.get_scheduled_start_time() or datetime.now(UTC)
    night = scheduled.date().isoformat()
    kept = records_of(records)
    steps = draw_steps(absolute(published), night, count, kept, beacon)
    done: list[Audited] = []
    failed: list[AuditFailed] = []
    for step in steps:
        with tags(f"run:{short(published)}", f"draw:{night}", f"step:{step}"):
            try:
                done.append(audit_step(absolute(published), step, backend, kept, night))
            except AuditFailed as error:  # every step that was drawn is answered, whatever became of another
                failed.append(error)
    if failed:
        raise failed[0]
    return done
