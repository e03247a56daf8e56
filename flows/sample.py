"""The nightly sample: draw steps that nobody could predict, record the draw, then audit them."""

from __future__ import annotations

from datetime import date

from prefect import flow, tags
from prefect.runtime import flow_run

from tasks.audit import audit_step
from tasks.references import Audited, Backend, Certificates, Count, Release
from tasks.sample import draw_steps


@flow(flow_run_name="nightly sample of {published}")
def nightly_sample(
    published: Release = "runs/demo/published",
    count: Count = 1,
    backend: Backend = "cpu",
    certificates: Certificates = "",
) -> list[Audited]:
    """Draw and audit `count` steps. One draw a night: starting it again audits the steps already drawn."""
    # The scheduled date, not today's: a run that starts late still belongs to its own night.
    scheduled = flow_run.get_scheduled_start_time()
    night = scheduled.date().isoformat() if scheduled else date.today().isoformat()
    steps = draw_steps(published, night, count)
    with tags(f"draw:{night}"):
        return [audit_step(published, step, backend, certificates) for step in steps]
