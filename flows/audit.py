"""Audit: one step replayed from a published run, in a process of its own, with a signed certificate."""

from __future__ import annotations

from prefect import flow, tags

from tasks.audit import audit_step
from tasks.references import Audited, Backend, Records, Release, Step, absolute, records_of


@flow(flow_run_name="audit {published}: step {step}")
def audit(
    published: Release = "runs/demo/published", step: Step = None, backend: Backend = "cpu", records: Records = ""
) -> Audited:
    """Replay one step, or regenerate the initial state, and compare every field of its ledger entry."""
    with tags("initial" if step is None else f"step:{step}"):
        return audit_step(absolute(published), step, backend, records_of(records))
