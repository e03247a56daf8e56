"""The fresh process of confirm.py: the same audit once more, unsigned, its finding told on standard output.

    python -m storage.audit.again PIECE BACKEND STORE_URI …     PIECE: "initial" or "step N"; a URI for each copy

One canonical JSON line a stage, and at the end one finding; nothing else.
"""

import os
import sys

from storage.audit.confirm import Finding, Stage
from storage.audit.replay import INITIAL, find
from storage.audit.verdict import AuditProgress, Report
from storage.mirrors import open_copies
from storage.records import Record


def found(uris: list[str], piece: str, backend: str, report: Report) -> Finding:
    """What this process finds."""
    step = None if piece == INITIAL else int(piece.removeprefix("step "))
    return Finding.of(find(open_copies(uris), step, backend, report))


def main() -> None:
    """Report to the descriptor that standard output was; what a library prints goes to standard error instead."""
    channel = os.dup(1)
    os.dup2(2, 1)

    def say(record: Record) -> None:
        line = record.canonical() + b"\n"
        while line:  # a signal may cut one write short
            line = line[os.write(channel, line) :]

    def report(p: AuditProgress) -> None:
        left = None if p.seconds_left is None else round(p.seconds_left)
        say(Stage(stage=p.stage, step=p.step, done=p.done, of=p.of, seconds_left=left))

    piece, backend, *uris = sys.argv[1:]
    say(found(uris, piece, backend, report))


if __name__ == "__main__":
    main()
