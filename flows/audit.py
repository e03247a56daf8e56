"""Audit: one step replayed from a published run, in a process of its own, with a signed certificate."""

from __future__ import annotations

from prefect import flow

from tasks.audit import audit_step
from tasks.references import Audited, Backend, Certificates, Release, Step


@flow(flow_run_name="audit {published}: step {step}")
def audit(
    published: Release = "runs/demo/published",
    step: Step = None,
    backend: Backend = "cpu",
    certificates: Certificates = "",
) -> Audited:
    """Replay one step, or regenerate the initial state, and compare every field of its ledger entry."""
    return audit_step(published, step, backend, certificates)
