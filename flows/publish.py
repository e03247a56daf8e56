"""Publish: a run and its windows under one address, read back and signed."""

from __future__ import annotations

from prefect import flow

from flows.naming import named
from tasks.publish import publish_run
from tasks.references import Places, Published, absolute


@flow(flow_run_name=named("publish", "folder"))
def publish(folder: str = "runs/demo", target: str = "") -> Published:
    """Copy ledger, checkpoints and windows to a store, read back every object and compare, then sign the release.

    Args:
        folder: The folder of the run, with mix/ and run/ in it.
        target: Folder or address to publish to. Empty: published/ in the run's folder.
    """
    where = Places.of(folder)
    return publish_run(where.run, where.mix, absolute(target) if target else where.published)
