"""What an audit says: its progress, and one of five verdicts with exit code, explanation, and what to do next."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from storage.mirrors import BadCopy


class Outcome(Enum):
    """(name, exit code, explanation, next)"""

    MATCH = (
        "match",
        0,
        "every field of the ledger entry came out equal",
        "verbatim verify checks the certificate offline",
    )
    NO_MATCH = (
        "no-match",
        10,
        "the replayed step is not what the ledger records",
        "verbatim accuse, with the same address and step, writes a dispute file that others judge on their machines",
    )
    INPUT_FAULT = (
        "input-fault",
        11,
        "something that was read is not what was promised, so nothing could be judged",
        "fetch the named object again from its publisher, then repeat the audit",
    )
    MACHINE_FAULT = (
        "machine-fault",
        12,
        "this machine disagrees with the conformance vectors or with itself; it says nothing about the run",
        "verbatim doctor, or another machine",
    )
    REFUSED = (
        "refused",
        13,
        "there is nothing to compare with: an audit without a target is no audit",
        "choose a step that the ledger records, with a version that implements the run's contract",
    )

    def __init__(self, label: str, exit_code: int, explanation: str, next_step: str) -> None:
        self.label, self.exit_code, self.explanation, self.next_step = label, exit_code, explanation, next_step


@dataclass(frozen=True)
class AuditProgress:
    """Reported before each stage; steps of the replay and seconds, measured in this audit."""

    # "self-test", also with how far it is; "ledger", "checkpoint", "replay", "unit"; in a fresh process behind
    # "repetition: "
    stage: str
    step: int | None
    done: int
    of: int
    seconds_left: float | None


Report = Callable[[AuditProgress], None]


@dataclass(frozen=True)
class Verdict:
    """The structured result of one audit.

    piece: "initial", "step N", or a part of a step (pieces.py). compared: the steps whose whole entries were compared,
    those passed on the way included. differs_at: the first step that did not match. fields, tensors: what differs
    there; a gradient's tensor is "gradient/<parameter>". fault: the kind of error behind an input fault, e.g.
    "CheckpointFault". bad_copies: what could not be used in one of several stores, whatever the verdict. explanation,
    next_step: in place of the outcome's, where the piece is no step.
    """

    outcome: Outcome
    piece: str
    detail: str
    compared: tuple[int, ...] = ()
    differs_at: int | None = None
    fields: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    fault: str = ""
    seconds: float = 0.0
    certificate: bytes | None = None
    bad_copies: tuple[BadCopy, ...] = ()
    explanation: str = ""
    next_step: str = ""

    @property
    def exit_code(self) -> int:
        """0 for a match, 10 to 13 otherwise."""
        return self.outcome.exit_code

    def document(self) -> dict[str, Any]:
        """Plain values for JSON; the certificate is a file of its own."""
        return {
            "verdict": self.outcome.label,
            "exit_code": self.exit_code,
            "piece": self.piece,
            "detail": self.detail,
            "explanation": self.explanation or self.outcome.explanation,
            "next": self.next_step or self.outcome.next_step,
            "compared": list(self.compared),
            "differs_at": self.differs_at,
            "fields": list(self.fields),
            "tensors": list(self.tensors),
            "fault": self.fault,
            "seconds": self.seconds,
            "bad_copies": [copy.document() for copy in self.bad_copies],
        }
