"""The nightly sample: draw steps that nobody could predict, record the draw, audit them, report."""

from __future__ import annotations

from flows.engine import flow
from flows.forms import Address, Backend, Count, Place
from flows.naming import named, tagged
from storage.audit.beacon import OWN
from tasks.audit import AuditFailed, audit_step
from tasks.page import report_page
from tasks.references import Audited, absolute, records_of
from tasks.sample import draw_steps


@flow(flow_run_name=named("nightly sample of", "published"))
def nightly_sample(
    published: Address = "runs/demo/published",
    count: Count = 1,
    backend: Backend = "cpu",
    records: Place = "",
    beacon: Place = OWN,
) -> list[Audited]:
    """Settle all nights up to this one, and audit the steps that were drawn.

    One statement and one draw a date, whichever slot runs and however often: a night whose statement was not drawn yet
    is drawn now, an earlier one without a statement is recorded as missed. The run's report page beside the records is
    then made anew. Fails unless all audits match, after that.

    Args:
        published: Folder or address that was published to, such as runs/demo/published.
        count: How many steps to draw.
        backend: cpu is fast, nvidia faster on an NVIDIA GPU, reference plain NumPy and slow. It changes no bit.
        records: Folder for this machine's statements, draws and certificates. Empty: runs/audits.
        beacon: A drand server, such as https://api.drand.sh; the draw then waits a quarter of an hour for its round, so
            that a witness can see the statement before. Or a file with a public random value. Or own: one is drawn
            here, on our word alone.
    """
    kept, release = records_of(records), absolute(published)
    done: list[Audited] = []
    failed: list[AuditFailed] = []
    with tagged(published):
        drawn = draw_steps(release, count, kept, beacon)
    for night, step in ((night, step) for night, steps in drawn.items() for step in steps):
        with tagged(published, f"draw:{night}", f"step:{step}"):
            try:
                done.append(audit_step(release, step, backend, kept, night))
            except AuditFailed as error:  # every step that was drawn is answered, whatever became of another
                failed.append(error)
    try:
        with tagged(published):
            report_page(release, kept)
    finally:  # what an audit found comes first
        if failed:
            raise failed[0]
    return done
