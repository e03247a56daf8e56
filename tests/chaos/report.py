"""What chaos tells: a row a phase."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.watch import Kill

MEANING = {
    "resume": "reading the newest checkpoint",
    "step": "forward, backward, sums, AdamW",
    "digest": "of gradient and state",
    "record": "the ledger's entry",
    "checkpoint": "parts, leaves, manifest",
    "probe": "held-out loss",
    "publish": "copy, read back, sign",
}
VICTIMS = ("rank 0", "another rank", "launcher", "flow")


def table(kills: Sequence[Kill]) -> str:
    """Markdown: kills that landed in each phase, by victim and by way; and those that came after it."""
    rows = [("phase", "kills in it", *VICTIMS, "at a call", "after a time", "missed: it was over")]
    rows.append(("---",) * len(rows[0]))
    for phase, meaning in MEANING.items():
        mine = [kill for kill in kills if kill.phase == phase]
        rows.append((f"{phase}: {meaning}", *map(str, _counts(mine))))
    rows.append(("all", *map(str, _counts(kills))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _counts(kills: Sequence[Kill]) -> list[int]:
    landed = [kill for kill in kills if kill.landed]
    victims = [sum(kill.victim == victim for kill in landed) for victim in VICTIMS]
    ways = [sum(kill.how == how for kill in landed) for how in ("call", "time")]
    return [len(landed), *victims, *ways, len(kills) - len(landed)]
