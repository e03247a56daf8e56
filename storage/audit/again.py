"""The fresh process of confirm.py: the same audit once more, unsigned, its finding told on standard output.

    python -m storage.audit.again PIECE BACKEND STORE_URI …     a URI for each copy

PIECE: "initial", "step N", a part of a step (pieces.py) or "held-out N" (held_out.py). One canonical JSON line a
stage, and at the end one finding; nothing else.
"""

import os
import sys

from storage.audit.certificate import HELD_OUT, PIECE
from storage.audit.confirm import Finding, Stage
from storage.audit.held_out import find_held_out
from storage.audit.pieces import find_piece
from storage.audit.replay import INITIAL, find
from storage.audit.verdict import AuditProgress, Report
from storage.mirrors import open_copies
from storage.records import Record


def found(uris: list[str], piece: str, backend: str, report: Report) -> Finding:
    """What this process finds."""
    release = open_copies(uris)
    if PIECE.fullmatch(piece):
        return Finding.of(find_piece(release, piece, backend, report))
    if HELD_OUT.fullmatch(piece):
        return Finding.of(find_held_out(release, piece, backend, report))
    step = None if piece == INITIAL else int(piece.removeprefix("step "))
    return Finding.of(find(release, step, backend, report))


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
