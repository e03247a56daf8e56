"""Audit: one step replayed from a published run, in a process of its own, with a signed certificate."""

from __future__ import annotations

from prefect.runtime import flow_run

from flows.engine import flow
from flows.forms import Address, Addresses, Backend, Place, Step
from flows.naming import short, tagged
from tasks.audit import audit_step
from tasks.references import Audited, absolute, records_of


def _name() -> str:
    given = flow_run.parameters
    piece = "the initial state" if given["step"] is None else f"step {given['step']}"
    return f"audit {piece} of {short(str(given['published']))}"


@flow(flow_run_name=_name)
def audit(
    published: Address = "runs/demo/published",
    step: Step = None,
    backend: Backend = "cpu",
    records: Place = "",
    mirrors: Addresses = (),
) -> Audited:
    """Replay one step, or regenerate the initial state, and compare every field of its ledger entry.

    Args:
        published: Folder or address that was published to, such as runs/demo/published.
        step: The step to replay, from 0. None: the initial state.
        backend: cpu is fast, nvidia faster on an NVIDIA GPU, reference plain NumPy and slow. It changes no bit.
        records: Folder for this machine's draws and certificates. Empty: runs/audits.
        mirrors: Further copies, folders or addresses. What is bad in one is reported, and taken from another.
    """
    with tagged(published, "initial" if step is None else f"step:{step}"):
        copies = [absolute(mirror) for mirror in mirrors]
        return audit_step(absolute(published), step, backend, records_of(records), mirrors=copies)
