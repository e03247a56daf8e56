"""Segment records: what really ran, between which steps, and how it ended.

    segments/<first>-<id>.start.json    written before the first step
    segments/<first>-<id>.end.json      written after the last; a segment that was killed has none

They stand beside the chain and change no digest in it.
"""

import secrets
from datetime import UTC, datetime
from typing import Literal

from storage.provenance import Provenance
from storage.records import Count, Digest, Record, Text
from storage.store import Store

Outcome = Literal["finished", "paused", "stopped", "halted", "diverged", "failed"]


class SegmentStart(Record):
    """A segment begins: from the state after `first_step` steps, until step `until` at most."""

    kind: Literal["segment-start"] = "segment-start"
    segment: Text
    run: Digest
    first_step: Count
    recorded_steps: Count  # entries that the ledger held then: those from first_step on are repeated and compared
    until: Count
    processes: Count = 1  # that shared each step
    provenance: Provenance
    time: Text


class SegmentEnd(Record):
    """A segment ended. Steps first_step … last_step − 1 ran, the first `validated_steps` of them were compared."""

    kind: Literal["segment-end"] = "segment-end"
    segment: Text
    run: Digest
    first_step: Count
    last_step: Count
    validated_steps: Count
    outcome: Outcome
    reason: Text
    time: Text


def now() -> str:
    """UTC to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def begin(
    store: Store,
    run: str,
    first_step: int,
    recorded_steps: int,
    until: int,
    provenance: Provenance,
    processes: int = 1,
) -> SegmentStart:
    """Write the record of a segment's start under a name of its own."""
    start = SegmentStart(
        segment=f"{first_step:08d}-{secrets.token_hex(4)}",
        run=run,
        first_step=first_step,
        recorded_steps=recorded_steps,
        until=until,
        processes=processes,
        provenance=provenance,
        time=now(),
    )
    store.create(f"segments/{start.segment}.start.json", start.canonical())
    return start


def end(
    store: Store, start: SegmentStart, last_step: int, validated_steps: int, outcome: Outcome, reason: str = ""
) -> None:
    """Write the record of its end."""
    record = SegmentEnd(
        segment=start.segment,
        run=start.run,
        first_step=start.first_step,
        last_step=last_step,
        validated_steps=validated_steps,
        outcome=outcome,
        reason=reason[:4096],
        time=now(),
    )
    store.create(f"segments/{start.segment}.end.json", record.canonical())
