"""Segment records: what really ran, between which steps, and how it ended.

    segments/<first>-<id>.start.json    written before the first step
    segments/<first>-<id>.end.json      written after the last; a segment that was killed has none

They stand beside the chain and change no digest in it.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median_low
from typing import Literal

from pydantic import Field

from storage.ledger import Ledger
from storage.provenance import Provenance
from storage.records import Count, Digest, Record, Text
from storage.store import Store

MAX_SEGMENT = 1 << 20
SLOW = 1.5  # times the ranks' median
_START = re.compile(r"segments/([^/]+)\.start\.json")
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


class RankTime(Record):
    """What a rank did in the steps of a segment but its first, which compiles: units, its own work, waiting."""

    units: Count
    worked_ms: Count
    waited_ms: Count


class SegmentEnd(Record):
    """A segment ended. Steps first_step … last_step − 1 ran, the first `validated_steps` of them were compared.

    ranks: of each of several, where the segment did not fail; slow_rank: the slowest, where slow() finds one.
    """

    kind: Literal["segment-end"] = "segment-end"
    segment: Text
    run: Digest
    first_step: Count
    last_step: Count
    validated_steps: Count
    outcome: Outcome
    reason: Text
    ranks: list[RankTime] = Field(default_factory=list)
    slow_rank: Count | None = None
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
    store: Store,
    start: SegmentStart,
    last_step: int,
    validated_steps: int,
    outcome: Outcome,
    reason: str = "",
    ranks: list[RankTime] | None = None,
) -> None:
    """Write the record of its end."""
    times = ranks or []
    record = SegmentEnd(
        segment=start.segment,
        run=start.run,
        first_step=start.first_step,
        last_step=last_step,
        validated_steps=validated_steps,
        outcome=outcome,
        reason=reason[:4096],
        ranks=times,
        slow_rank=slow(times),
        time=now(),
    )
    store.create(f"segments/{start.segment}.end.json", record.canonical())


@dataclass(frozen=True)
class Segment:
    """A segment as its records tell it; end: None where it has none, since it was killed or still runs."""

    start: SegmentStart
    end: SegmentEnd | None


def load_segments(store: Store, ledger: Ledger) -> list[Segment]:
    """Every segment of this ledger's run, in the order in which they began; InputFault for a damaged record.

    One that ended after the ledger did counts as still running: the ledger was read before.
    """
    found, keys = [], store.list("segments/")
    there = set(keys)
    for match in map(_START.fullmatch, keys):
        if match and (start := SegmentStart.parse(_read(store, match[0]), match[0])).run == ledger.run_id:
            key = f"segments/{match[1]}.end.json"
            end = SegmentEnd.parse(_read(store, key), key) if key in there else None
            found.append(Segment(start, end if end and _ended(end, ledger) else None))
    return sorted(found, key=lambda segment: (segment.start.time, segment.start.segment))


def _ended(end: SegmentEnd, ledger: Ledger) -> bool:
    """Whether it ended within this ledger."""
    within = end.first_step + end.validated_steps <= end.last_step <= len(ledger)
    return end.run == ledger.run_id and within


def _read(store: Store, key: str) -> bytes:
    return store.read(key, limit=MAX_SEGMENT)


def slow(ranks: list[RankTime]) -> int | None:
    """The rank whose work takes longest by the unit, where that is more than 1.5 times the median."""
    paces = _paces(ranks)
    slowest = max(paces, key=paces.__getitem__, default=None)
    if slowest is None or paces[slowest] <= SLOW * median_low(paces.values()):
        return None
    return slowest


def told_slow(ranks: list[RankTime]) -> str:
    """One sentence about the slow rank; "" where there is none."""
    if (rank := slow(ranks)) is None:
        return ""
    paces = _paces(ranks)
    return (
        f"rank {rank} is slow: {paces[rank]:,.0f} ms of work a unit, the median of {len(paces)} ranks is "
        f"{median_low(paces.values()):,.0f} ms; the others wait for it"
    )


def _paces(ranks: list[RankTime]) -> dict[int, float]:
    """Milliseconds of work a unit, of the ranks that had any."""
    return {rank: time.worked_ms / time.units for rank, time in enumerate(ranks) if time.units}
