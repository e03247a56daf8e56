"""What the records of a run amount to, for a reader who names the keys that he counts.

Every drawn step has one of STATES. Every night was stated, drawn or missed. What counts against the run is a Finding;
PROOFS are those that the trainer's own signatures prove.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import combinations
from typing import Self

from storage.audit.certificate import Body
from storage.audit.collect import Evidence
from storage.audit.draw import Draw
from storage.audit.named import Named
from storage.audit.statement import Night, Statement, begins, check_one_history, check_same, round_is_out
from storage.audit.witness import Witness, in_time
from storage.errors import Equivocation
from storage.ledger import Entry, Ledger

DEADLINE = timedelta(days=7)  # after the date of the draw
STATES = {
    "due": "drawn; there is time until its deadline",
    "unanswered": "its deadline passed, and the state before it was not published",
    "overdue": "its deadline passed; the state before it is published, but no named key has audited it",
    "attested": "one named key, or several on one backend, replayed it: it matches",
    "confirmed": "two named keys on two distinct backends replayed it: it matches",
    "disputed": "a named key replayed it or a part of it, and that does not match",
}
WITNESSED = "witnessed by "
PROOFS = ("two histories", "two statements", "called missed")


@dataclass(frozen=True)
class Finding:
    """What counts against a run. kind: one of PROOFS; "dropped", a statement without a draw; "missed", a night without
    a statement; "redrawn", two draws of one night, of which a file's values were exchanged; "ahead", a night to come.
    """

    kind: str
    date: str
    says: str


@dataclass(frozen=True)
class DrawnStep:
    """A drawn step: on whose word the draw rests, and who answered.

    draw: the digest of its record; a second one of a night counts against the run.
    among: how many steps the run had by the statement: none after them could be drawn.
    parts: parts of the step ("unit 3", "sum") that matched for named keys, which do not attest the whole. against: the
    named keys for which the step, or a part of it, did not match. unlisted: how many certificates of keys without a
    name there are of it or a part of it.
    """

    date: str
    draw: str
    step: int
    among: int
    basis: str
    state: str
    names: tuple[str, ...]
    backends: tuple[str, ...]
    parts: tuple[str, ...]
    against: tuple[str, ...]
    unlisted: int

    @property
    def witnessed(self) -> bool:
        """Whether a named key saw the statement of its draw in time."""
        return self.basis.startswith(WITNESSED)


@dataclass(frozen=True)
class Match:
    """A named key's word that steps first … last came out equal."""

    name: str
    backend: str
    first: int
    last: int


@dataclass(frozen=True)
class Audited:
    """What named keys say of each step: how often it matched, which parts of it did, and for whom it, or a part, did
    not."""

    matches: list[list[Match]]
    parts: dict[int, set[str]]
    mismatches: dict[int, set[str]]

    @classmethod
    def of(cls, bodies: list[Body], named: Named, steps: int) -> Self:
        """By the certificates that count; see counted()."""
        bodies = counted(bodies, named)
        matches: list[list[Match]] = [[] for _ in range(steps)]
        for match in matching(bodies, named):
            for step in range(match.first, match.last + 1):
                matches[step].append(match)
        mismatches: dict[int, set[str]] = {}
        for body in bodies:
            if body.verdict == "no-match" and body.step is not None:
                mismatches.setdefault(body.step, set()).add(named[body.auditor])
        return cls(matches, parts(bodies), mismatches)

    def level(self, step: int) -> str:
        """ "disputed"; "confirmed" by two names on two backends; "attested" by any; "" where nobody audited it."""
        found = {(match.name, match.backend) for match in self.matches[step]}
        if step in self.mismatches:
            return "disputed"
        if any(name != other and backend != another for (name, backend), (other, another) in combinations(found, 2)):
            return "confirmed"
        return "attested" if found else ""


def drawn_steps(
    evidence: Evidence,
    ledger: Ledger,
    named: Named,
    audited: Audited,
    published: Callable[[int], bool],
    now: datetime,
) -> list[DrawnStep]:
    """The state of every drawn step, by date and step. audited: by the evidence; published: see proven_states()."""
    unlisted = Counter(body.step for body in evidence.certificates if body.auditor not in named)
    words = by_statement(evidence)
    rows = []
    for draw in sorted(evidence.draws, key=lambda draw: (draw.date, draw.digest())):
        if now < begins(draw.date):
            continue
        seen = {word.body.witness for word in words.get(draw.statement.digest(), ()) if in_time(word, draw.statement)}
        basis, late = _basis(seen, ledger, named), now.astimezone(UTC) >= deadline(draw)
        for step in draw.steps:
            names, backends = ({getattr(match, of) for match in audited.matches[step]} for of in ("name", "backend"))
            rows.append(
                DrawnStep(
                    date=draw.date,
                    draw=draw.digest(),
                    step=step,
                    among=draw.body.step,
                    basis=basis,
                    state=audited.level(step) or _unanswered(late, step, published),
                    names=tuple(sorted(names)),
                    backends=tuple(sorted(backends)),
                    parts=tuple(sorted(audited.parts.get(step, ()))),
                    against=tuple(sorted(audited.mismatches.get(step, ()))),
                    unlisted=unlisted[step],
                )
            )
    return rows


def deadline(draw: Draw) -> datetime:
    """When a draw must have been answered."""
    return datetime.fromisoformat(draw.date).replace(tzinfo=UTC) + DEADLINE


def counted(bodies: list[Body], named: Named) -> list[Body]:
    """Certificates by named keys, without those that show a proof of replay which another named key shows too."""
    listed = [body for body in bodies if body.auditor in named]
    shown = _shown(listed)
    return [body for body in listed if len(shown[body.proof]) == 1]


def copies(bodies: list[Body]) -> list[str]:
    """Which keys show one proof of replay: it is keyed by the auditor, so all but one of them copied it."""
    same = (sorted(keys) for keys in _shown(bodies).values() if len(keys) > 1)
    return [f"keys {' and '.join(keys)} show one proof of replay" for keys in same]


def _shown(bodies: list[Body]) -> dict[str, set[str]]:
    """Proof of replay → the keys that show it."""
    shown: dict[str, set[str]] = {}
    for body in bodies:
        shown.setdefault(body.proof, set()).add(body.auditor)
    return shown


def matching(bodies: list[Body], named: Named) -> Iterator[Match]:
    """What replays of whole steps compared; each step passed on the way was compared too."""
    for body in bodies:
        if isinstance(body.reproduced, Entry) and body.step is not None:
            last = body.step if body.verdict == "match" else body.step - 1
            if body.first_step <= last:
                backend = body.provenance.backend.removeprefix("checked:")
                yield Match(named[body.auditor], backend, body.first_step, last)


def parts(bodies: list[Body]) -> dict[int, set[str]]:
    """Step → its parts that came out equal, as a certificate names them behind the step: "unit 3", "sum", "update"."""
    found: dict[int, set[str]] = {}
    for body in bodies:
        if body.step is not None and not isinstance(body.reproduced, Entry) and body.verdict == "match":
            found.setdefault(body.step, set()).add(body.piece.removeprefix(f"step {body.step} "))
    return found


def _unanswered(late: bool, step: int, published: Callable[[int], bool]) -> str:
    if not late:
        return "due"
    return "overdue" if published(step) else "unanswered"


def by_statement(evidence: Evidence) -> dict[str, list[Witness]]:
    """What witnesses said, by the digest of the statement that they saw."""
    words: dict[str, list[Witness]] = {}
    for witness in evidence.witnesses:
        words.setdefault(witness.body.statement, []).append(witness)
    return words


def _basis(seen: set[str], ledger: Ledger, named: Named) -> str:
    """Who saw a statement before its round, by their keys: named witnesses, unnamed ones, or nobody but the trainer."""
    trainer = ledger.header.trainer
    names = sorted({named[key] for key in seen if key in named} - {named.get(trainer, "")})
    if names:
        return WITNESSED + ", ".join(names)
    return "seen by keys without a name" if seen - {trainer, *named} else "trainer's word"


def findings(evidence: Evidence, named: Named, now: datetime) -> list[Finding]:
    """What counts against the run, by date."""
    found = [Finding("two histories", "", says) for says in evidence.against]
    found += [*_contradictions(evidence), *_redrawn(evidence, named), *_dropped(evidence, now), *_missed(evidence, now)]
    found += _ahead(evidence, now)
    return sorted(found, key=lambda finding: finding.date)


def _contradictions(evidence: Evidence) -> Iterator[Finding]:
    try:
        check_one_history(evidence.statements)
    except Equivocation as error:
        yield Finding("two histories", "", error.message)
    first: dict[str, Night] = {}
    nights: list[Night] = [*evidence.statements, *evidence.missed]
    for night in nights:
        try:
            check_same(first.setdefault(night.body.date, night), night)
        except Equivocation as error:
            kind = "two statements" if isinstance(night, Statement) else "called missed"
            yield Finding(kind, night.body.date, error.message)


def _redrawn(evidence: Evidence, named: Named) -> Iterator[Finding]:
    records: dict[str, str] = {}
    for draw in evidence.draws:
        if records.setdefault(draw.date, draw.digest()) != draw.digest():
            says = f"two draws: {records[draw.date]} and {draw.digest()}"
            word = "; a draw by a file's value bears no signature but its statement's, so find out who made which"
            yield Finding("redrawn", draw.date, says + (word if draw.beacon.scheme == "file" else ""))
    bodies = counted(evidence.certificates, named)
    for date_of, record in sorted({(body.draw.date, body.draw.record) for body in bodies if body.draw}):
        if record != records.get(date_of, record):
            says = f"a certificate names draw {record}, the record is {records[date_of]}"
            yield Finding("redrawn", date_of, says)


def _dropped(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    """Statements whose round is out, or whose night is over, without a draw."""
    drawn = {draw.statement.digest() for draw in evidence.draws}
    today = now.astimezone(UTC).date().isoformat()
    for statement in evidence.statements:
        body = statement.body
        out = round_is_out(body, now)
        if statement.digest() not in drawn and (body.date < today if out is None else out):
            says = f"round {body.round} of {body.scheme} is out, but the statement has no draw"
            yield Finding("dropped", body.date, says)


def _ahead(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    """Nights that have not begun: the trainer's clock is ahead, or the reader's behind."""
    nights: list[Night] = [*evidence.statements, *evidence.missed]
    for date_of in sorted({night.body.date for night in nights if now < begins(night.body.date)}):
        yield Finding("ahead", date_of, "its night has not begun: until then it counts for nothing")


def _missed(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    """Nights without a statement, from the first that has one to yesterday."""
    stated = {statement.body.date for statement in evidence.statements}
    if not stated:
        return
    day, today = date.fromisoformat(min(stated)), now.astimezone(UTC).date()
    while day < today:
        if day.isoformat() not in stated:
            yield Finding("missed", day.isoformat(), "no statement was made: nothing was drawn")
        day += timedelta(days=1)
