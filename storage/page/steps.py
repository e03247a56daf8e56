"""The map of all steps: what is known of each, what its colour proves, and the few that there is more to say of.

A step has the bits of everything that holds for it; its colour is the highest. Most steps have the bits of the one
before, so the page holds runs of equal ones.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from storage.audit.certificate import Body
from storage.audit.standing import Standing
from storage.ledger import Entry
from storage.page.history import History
from storage.page.markup import count, section, table

MAX_NOTES = 20_000  # steps with more to say; the tables below the map go on
MAX_LINES = 12  # of one step: strangers' certificates are without number


@dataclass(frozen=True)
class Mark:
    """A state of a step. path: its sign in a box of 8 by 8, drawn as a line, so that colour is not all there is."""

    name: str
    label: str
    path: str
    proves: str


MARKS = (
    Mark(
        "recorded",
        "recorded",
        "",
        "Its entry stands in the chain, so it cannot be changed any more unseen. That it is right, nobody says but the "
        "trainer.",
    ),
    Mark(
        "checkpoint",
        "checkpoint before it",
        "M3 4h2",
        "The state before it is published. Nothing is proven, but anyone can replay the step from there.",
    ),
    Mark(
        "validated",
        "repeated by the trainer",
        "M2 3h4M2 5h4",
        "A restart did the step again and came to the recorded entry. It is the trainer's word.",
    ),
    Mark(
        "unlisted",
        "certified by others",
        "M3.9 4h.2",
        "A key that this page does not count signed a certificate for it. It proves nothing until you know whose key "
        "it is, or replay the step.",
    ),
    Mark(
        "due",
        "drawn, due",
        "M4 2v2.2h1.8",
        "A public random value chose it for an audit, and a week from the draw is not over. Nothing is proven yet.",
    ),
    Mark(
        "opened",
        "opened",
        "M4 2a2 2 0 1 0 .01 0z",
        "Someone published the states before and after it. Whoever reads them compares them with the ledger's roots, "
        "and can audit its parts alone; until that is done, nothing is proven.",
    ),
    Mark(
        "part",
        "audited in part",
        "M2 4h4",
        "One or more of its parts came out equal for a key that this page counts: a unit, the sum, an update. Each "
        "proves itself; the rest of the step is open.",
    ),
    Mark(
        "overdue",
        "overdue",
        "M4 1.5v3M4 6v.5",
        "It was drawn, a week passed, and the state before it is published; but no counted key has audited it.",
    ),
    Mark(
        "unanswered",
        "unanswered",
        "M2 2h4v4h-4z",
        "It was drawn, a week passed, and the state before it was not published. That speaks against the run.",
    ),
    Mark(
        "attested",
        "attested",
        "M1.7 4.2l1.6 1.7L6.3 2.2",
        "A counted key replayed the whole step, and every recorded digest came out equal. One key, or one kind of "
        "machine.",
    ),
    Mark(
        "confirmed",
        "confirmed",
        "M.8 4.2l1.5 1.6L5 2.2M4 5.6l.3.2L7.2 2.2",
        "Counted keys of two names replayed it on two distinct backends, and every recorded digest came out equal. To "
        "be wrong, both would have to err or lie alike.",
    ),
    Mark(
        "disputed",
        "no match",
        "M1.8 1.8l4.4 4.4M6.2 1.8L1.8 6.2",
        "A counted key replayed it, or a part of it, and something else came out. Ledger, opening or auditor is wrong: "
        "an audit of the whole step by another, or a dispute, tells which.",
    ),
)
NUMBER = {mark.name: number for number, mark in enumerate(MARKS)}
DRAWN = 1 << len(MARKS)  # beside its state: only drawn steps speak for the others
OF_AUDITS = NUMBER["unlisted"]  # from here on marks come from records of audits


def step_bits(history: History, standing: Standing | None) -> np.ndarray:
    """u16[N]: bit m where MARKS[m] holds for the step, and DRAWN."""
    bits = np.full(len(history.ledger), 1, np.uint16)
    known = [("checkpoint", history.states), *(("validated", steps) for steps in history.validated)]
    for name, steps in [*known, *(_audited(standing) if standing else ())]:
        for step in steps:
            if step < len(bits):
                bits[step] |= 1 << NUMBER[name]
    if standing:
        bits[_unlisted(standing, len(bits))] |= 1 << NUMBER["unlisted"]
    for row in standing.rows if standing else ():
        bits[row.step] |= DRAWN
    return bits


def _audited(standing: Standing) -> Iterator[tuple[str, Iterable[int]]]:
    """Names of marks that records of audits give, with the steps that have them."""
    yield "opened", standing.opened
    yield "part", standing.audited.parts
    yield from ((level, [step]) for step, level in enumerate(standing.levels) if level)
    yield from ((row.state, [row.step]) for row in standing.rows)


def _unlisted(standing: Standing, steps: int) -> np.ndarray:
    """bool[N]: steps of which keys without a name signed a certificate; in a time that does not grow with how many
    steps each of them says it passed."""
    change = np.zeros(steps + 1, np.int64)  # of how many such certificates there are, from each step to the next
    for body in standing.evidence.certificates:
        if body.auditor not in standing.named and body.step is not None:
            whole = isinstance(body.reproduced, Entry) and body.verdict == "match"
            change[body.first_step if whole else body.step] += 1
            change[body.step + 1] -= 1
    return np.cumsum(change, dtype=np.int64)[:-1] > 0


def runs(bits: np.ndarray) -> list[int]:
    """Of u16[N], each run of equal values as two numbers, length and value, one run after the other."""
    starts = np.flatnonzero(np.diff(bits.astype(np.int32), prepend=-1))
    lengths = np.diff(np.append(starts, len(bits)))
    return np.column_stack([lengths, bits[starts]]).reshape(-1).tolist()


def colours(bits: np.ndarray) -> Counter[int]:
    """How many steps are shown as each mark: by its number, the highest bit below DRAWN."""
    values, counts = np.unique(bits & (DRAWN - 1), return_counts=True)
    found: Counter[int] = Counter()
    for value, number in zip(values.tolist(), counts.tolist(), strict=True):
        found[value.bit_length() - 1] += number
    return found


def notes(history: History, standing: Standing | None) -> dict[int, list[str]]:
    """What more there is to say of some steps, as plain text, at most MAX_NOTES of them; of keys that count first."""
    found: dict[int, list[str]] = {}
    for entry in history.ledger:
        if entry.event:
            found.setdefault(entry.step, []).append(EVENTS[entry.event])
    for step, said in _said_of_audits(standing) if standing else ():
        found.setdefault(step, []).append(said)
    return {step: _shortened(lines) for step, lines in sorted(found.items())[:MAX_NOTES]}


def _shortened(lines: list[str]) -> list[str]:
    left = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {left:,} more"] if left > 0 else lines


EVENTS = {
    "spike": "spike: its gradient norm was above the limit, the update was skipped",
    "nonfinite": "not finite: the update was skipped",
    "cooldown": "cooldown after a spike: the update was skipped",
}


def _said_of_audits(standing: Standing) -> Iterator[tuple[int, str]]:
    yield from ((row.step, f"drawn on {row.date}, {row.basis}") for row in standing.rows)
    for body in sorted(standing.evidence.certificates, key=lambda body: body.auditor not in standing.named):
        if body.step is not None:
            yield body.step, _said(body, standing)


def _said(body: Body, standing: Standing) -> str:
    who = standing.named.get(body.auditor, f"unlisted key {body.auditor[:16]}")
    what = "match" if body.verdict == "match" else "no match"
    return f"{what} of {body.piece} by {who} on {body.provenance.backend}"


def map_section(bits: np.ndarray, audits: bool) -> str:
    """The map's place in the page, filled by its script, and the legend, which needs none. audits: whether known."""
    shown, steps = colours(bits), len(bits)
    if not steps:
        return ""
    drawn = int(np.count_nonzero(bits & DRAWN))
    larger = f" {count(drawn, 'drawn step stands', 'drawn steps stand')} out by size or a frame." if drawn else ""
    return section(
        "map",
        "Every step",
        f"<p>{count(steps, 'step')}, each one cell, from the first at the top left.{larger} Choose one by pointing, "
        'by its number, or with the arrow keys. <span id="row"></span></p>',
        _finder(steps),
        f'<canvas id="cells" tabindex="0" role="slider" aria-label="Map of all steps" aria-valuemin="0" '
        f'aria-valuemax="{steps - 1}" aria-valuenow="0" aria-valuetext="step 0" aria-describedby="keys"></canvas>',
        '<p id="keys" class="small">Arrow keys: the next step, the next row; Page Up and Down: ten rows; Home, End; '
        "N and P: the next or previous drawn step.</p>",
        "<noscript><p>The map needs the script that lies in this page; the table has the numbers.</p></noscript>",
        _legend(shown, audits),
    )


def _finder(steps: int) -> str:
    return (
        '<form id="find"><label for="step">Step</label> '
        f'<input id="step" type="number" inputmode="numeric" min="0" max="{steps - 1}" value="0" required> '
        '<button>Go</button> <button type="button" id="before">Previous drawn</button> '
        '<button type="button" id="after">Next drawn</button></form>'
        '<p id="said" class="said" role="status" aria-live="polite">Step 0</p>'
    )


def _legend(shown: Counter[int], audits: bool) -> str:
    rows = []
    for number, mark in reversed(list(enumerate(MARKS))):
        if number < OF_AUDITS or audits:
            sign = f'<svg class="sign m{number}" viewBox="0 0 8 8" aria-hidden="true"><path d="{mark.path}"/></svg>'
            label = f'<button type="button" data-mark="{number}" title="go to the next">{mark.label}</button>'
            rows.append((f"{sign}{label}", f"{shown[number]:,}", mark.proves))
    return table(("Colour", "Steps", "What it proves"), rows, numbers=(1,))
