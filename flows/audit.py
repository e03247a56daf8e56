"""Audit: one step replayed from a published run, in a process of its own, with a signed certificate."""

from __future__ import annotations

from prefect import flow, tags

from tasks.audit import audit_step
from tasks.references import Audited, Backend, Step, absolute, records_of


@flow(flow_run_name="audit {published}: step {step}")
def audit(
    published: str = "runs/demo/published", step: Step = None, backend: Backend = "cpu", records: str = ""
) -> Audited:
    """Replay one step, or regenerate the initial state, and compare every field of its ledger entry.

    Args:
        published: Folder or address that was published to, such as runs/demo/published.
        step: The step to replay, from 0. Empty: the initial state.
        backend: cpu is fast; reference is plain NumPy and slow. It changes no bit.
        records: Folder for this machine's draws and certificates. Empty: runs/audits.
    """
    with tags("initial" if step is None else f"step:{step}"):
        return audit_step(absolute(published), step, backend, records_of(records))
