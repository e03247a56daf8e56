"""Task of sampling: which steps a date's audits must replay, recorded before they start."""

from __future__ import annotations

import os
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from storage.audit.certificate import Beacon
from storage.audit.draw import make_draw, read_beacon
from storage.ledger import Ledger
from storage.store import Store, open_store
from tasks.references import key_name


@task(task_run_name="draw {count} steps for {date}", cache_policy=NO_CACHE)
def draw_steps(store: str, date: str, count: int, records: str, beacon: str = "") -> list[int]:
    """The draw of a date: made now, or the one recorded first. Without a beacon file, a value is drawn here."""
    kept = open_store(records)
    value = read_beacon(Path(beacon)) if beacon else _own_value(kept, date)
    draw = make_draw(kept, Ledger(open_store(store)), date, value, count)
    create_markdown_artifact(
        f"**Steps {', '.join(map(str, draw.steps))}** of {draw.among}\n\n"
        f"- on the {draw.basis}; beacon `{draw.beacon.value}`\n- ledger head `{draw.head}`\n- record `{draw.digest()}`",
        key=key_name("draw", date),
        description=f"Draw of {date} from {store}",
    )
    return draw.steps


def _own_value(records: Store, date: str) -> Beacon:
    """A random value of this machine's, kept under the date so that it is drawn once."""
    key = f"beacons/{date}.json"
    records.create(key, Beacon(scheme="file", round=1, value=os.urandom(32).hex()).canonical())
    return Beacon.parse(records.read(key), key)
