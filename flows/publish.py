"""Publish: a run and its windows under one address, read back and signed."""

from __future__ import annotations

from flows.engine import flow
from flows.forms import Address, Place
from flows.naming import named, tagged
from tasks.publish import publish_run
from tasks.references import Places, Published, absolute


@flow(flow_run_name=named("publish", "folder"))
def publish(folder: Address = "runs/demo", target: Place = "", records: Place = "") -> Published:
    """Copy a run and its windows to a store, read back every object and compare, then sign the release.

    Args:
        folder: The folder of the run, with mix/ and run/ in it.
        target: Folder or address to publish to. Empty: published/ in the run's folder.
        records: Folder of an auditor's records, whose draws and certificates of this run are published too. Empty:
            none.
    """
    where = Places.of(folder)
    to = absolute(target) if target else where.published
    with tagged(where.name):
        return publish_run(where.run, where.mix, to, absolute(records) if records else "")
