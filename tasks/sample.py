"""Task of sampling: every night settled, and which steps must be audited now, recorded before audits start."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from storage.audit.beacon import open_source
from storage.audit.keys import load_or_create_key
from storage.audit.settle import Settled, settle
from storage.ledger import Ledger
from storage.store import open_store
from tasks.references import KEYS, key_name


@task(task_run_name="draw {count} steps", cache_policy=NO_CACHE)
def draw_steps(store: str, count: int, records: str, beacon: str = "") -> dict[str, list[int]]:
    """Date → steps: today's draw, and those of earlier statements that were still due. Waits for today's round."""
    kept, ledger, key = open_store(records), Ledger(open_store(store)), load_or_create_key(KEYS, "trainer")
    source = open_source(beacon, kept)
    while (settled := settle(kept, ledger, key, source, count, datetime.now(UTC))).due:
        time.sleep(max(1.0, (settled.due - datetime.now(UTC)).total_seconds()))
    _show(store, settled)
    return {date: draw.steps for date, draw in settled.draws.items()}


def _show(store: str, settled: Settled) -> None:
    body = settled.statement.body
    lines = [
        f"- {date}: steps {', '.join(map(str, draw.steps))} of {draw.body.step}; {draw.beacon.scheme} round "
        f"{draw.beacon.round} `{draw.beacon.value}`; record `{draw.digest()}`"
        for date, draw in settled.draws.items()
    ]
    lines += [f"- {date}: **still to be drawn**: {why}" for date, why in settled.undrawn.items()]
    lines += [f"- {date}: missed" for date in settled.missed]
    create_markdown_artifact(
        f"**Draw of {body.date}** on head `{body.head}`\n\n" + "\n".join(lines) + "\n",
        key=key_name("draw", body.date),
        description=f"Draw of {body.date} from {store}",
    )
