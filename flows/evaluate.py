"""Evaluate: held-out losses of a published checkpoint checked, and tasks asked where a file of them is given."""

from __future__ import annotations

from flows.engine import flow
from flows.forms import Address, Backend, Place, Step
from flows.naming import named, tagged
from tasks.evaluate import check_held_out, score
from tasks.references import Audited, Scored, absolute, records_of


@flow(flow_run_name=named("evaluate", "published"))
def evaluate(
    published: Address = "runs/demo/published",
    step: Step = None,
    tasks: Place = "",
    backend: Backend = "cpu",
    records: Place = "",
) -> tuple[Audited, Scored | None]:
    """Measure held-out losses again and compare them with the signed record; ask tasks, by lm-eval.

    Args:
        published: Folder or address that was published to, such as runs/demo/published.
        step: A checkpoint, by the steps before it. None: the last one.
        tasks: A YAML file of tasks, for which `make olmes` installs lm-eval once. Empty: none are asked.
        backend: For the held-out losses: cpu, nvidia on an NVIDIA GPU, or reference, which is slow. It changes no bit.
        records: Folder for this machine's certificates and records. Empty: runs/audits.
    """
    with tagged(published):
        address, kept = absolute(published), records_of(records)
        audited = check_held_out(address, step, backend, kept)
        return audited, score(address, absolute(tasks), audited.step, kept) if tasks else None
