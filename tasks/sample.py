"""Task of sampling: every night settled, and which steps must be audited now, recorded before audits start."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage.audit.beacon import OWN, open_source
from storage.audit.collect import collect
from storage.audit.draw import Draw
from storage.audit.keys import load_key, load_or_create_key
from storage.audit.settle import Settled, settle
from storage.ledger import Ledger
from storage.store import Store, open_store
from tasks import show
from tasks.references import KEYS, key_name

SHOWN = 100  # nights in the artifact; the records have them all


@task(task_run_name="draw {count} steps", cache_policy=NO_CACHE)
def draw_steps(store: str, count: int, records: str, beacon: str = OWN) -> dict[str, list[int]]:
    """Date → steps to audit: of today's draw, and of those of earlier statements that were still due; without those
    that this machine audited already, however often a night is settled. Waits for today's round."""
    kept, ledger, key = open_store(records), Ledger(open_store(store)), load_key(KEYS, "trainer")
    source = open_source(beacon, kept)
    late: dict[str, Draw] = {}  # made before the wait: later calls know them as drawn
    while (settled := settle(kept, ledger, key, source, count, datetime.now(UTC))).due:
        late |= settled.draws
        stated = settled.statement.body
        when = f"{settled.due:%H:%M:%S %Z}"
        get_run_logger().info(f"stated; the steps follow at {when}, from round {stated.round} of {stated.scheme}")
        time.sleep(max(1.0, (settled.due - datetime.now(UTC)).total_seconds()))
    settled = replace(settled, draws=late | settled.draws)
    done = _answered(kept, ledger)
    _show(store, settled, done)
    return {date: [step for step in draw.steps if (date, step) not in done] for date, draw in settled.draws.items()}


def _answered(records: Store, ledger: Ledger) -> set[tuple[str, int]]:
    """(date, step) of draws for which this machine's auditor found a match."""
    key = load_or_create_key(KEYS, "auditor").public
    return {
        (body.draw.date, body.step)
        for body in collect([records], ledger, [key]).certificates
        if body.auditor == key and body.draw and body.step is not None
        if body.verdict == "match" and body.piece == f"step {body.step}"
    }


def _show(store: str, settled: Settled, done: set[tuple[str, int]]) -> None:
    body = settled.statement.body
    lines = [
        f"{date}: steps {', '.join(_step(date, step, done) for step in draw.steps)} of {draw.body.step}; "
        f"{draw.beacon.scheme} round {draw.beacon.round} `{draw.beacon.value}`; record `{draw.digest()}`"
        for date, draw in settled.draws.items()
    ]
    lines += [f"{date}: **still to be drawn**: {why}" for date, why in settled.undrawn.items()]
    lines += [f"{date}: missed" for date in settled.missed]
    facts = (*lines[:SHOWN], f"on head `{body.head}`", show.link(store))
    show.result(key_name("draw", body.date), f"Draw of {body.date}", facts)


def _step(date: str, step: int, done: set[tuple[str, int]]) -> str:
    return f"{step} (audited before: match)" if (date, step) in done else str(step)
