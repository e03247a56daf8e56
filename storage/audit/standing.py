"""What the records of a run amount to at a time, for a reader who counts certain keys: all of it, computed once."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.audit.collect import Evidence
from storage.audit.coverage import Proven, proven
from storage.audit.named import Named
from storage.audit.opened import opened_steps, proven_states
from storage.audit.statement import StatementBody, begins, round_is_out
from storage.audit.states import PROOFS, Audited, DrawnStep, Finding, copies, drawn_steps, findings
from storage.ledger import Ledger
from storage.store import Store

COUNTS_AGAINST = (*PROOFS, "dropped", "redrawn")


@dataclass(frozen=True)
class Standing:
    """rows: every drawn step; levels: "", "attested", "confirmed" or "disputed" of every step, drawn or not.

    opened: steps of which an opening lies beside the run; whether it is sound, whoever audits by it finds out. waiting:
    nights whose round is still to come.
    """

    now: datetime
    named: Named
    evidence: Evidence
    rows: list[DrawnStep]
    audited: Audited
    levels: list[str]
    proven: Proven
    findings: list[Finding]
    opened: frozenset[int]
    waiting: list[str]

    @property
    def against(self) -> list[Finding]:
        """What counts against the run: a missed night alone does not."""
        return [finding for finding in self.findings if finding.kind in COUNTS_AGAINST]

    @property
    def copied(self) -> list[str]:
        """Which keys show one proof of replay."""
        return copies(self.evidence.certificates)

    @property
    def states(self) -> Counter[str]:
        """How many drawn steps have each state."""
        return Counter(row.state for row in self.rows)


def standing(release: Store, ledger: Ledger, evidence: Evidence, named: Named, now: datetime) -> Standing:
    """The standing of the run in `release` by this evidence."""
    audited = Audited.of(evidence.certificates, named, len(ledger))
    rows = drawn_steps(evidence, ledger, named, audited, proven_states(release, ledger), now)
    return Standing(
        now=now.astimezone(UTC),
        named=named,
        evidence=evidence,
        rows=rows,
        audited=audited,
        levels=[audited.level(step) for step in range(len(ledger))],
        proven=proven(rows, len(ledger)),
        findings=findings(evidence, named, now),
        opened=opened_steps(release),
        waiting=sorted(s.body.date for s in evidence.statements if _is_waiting(s.body, now)),
    )


def _is_waiting(body: StatementBody, now: datetime) -> bool:
    return begins(body.date) <= now and round_is_out(body, now) is False
