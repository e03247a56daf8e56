"""How long a segment outlives one of its processes: each rank killed, and each stopped, at a step of a small real run.

    python -m tests.bench.lost_ranks [RANKS]

Prints a Markdown table; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tasks.process import ChildKilled
from tests.tasks.test_process import gone
from tests.tasks.test_segment import Trainer, begin

AT = 5  # the step after whose report the signal is sent


def lost(trainer: Trainer, size: int, rank: int, number: signal.Signals) -> dict[str, str | float]:
    """One segment of `size` ranks of which one gets the signal: seconds until the parent knows, until all are gone."""
    sent: list[float] = []
    found: list[int] = []

    def strike(launcher: int, ranks: list[int]) -> None:
        found.extend([launcher, *ranks])
        sent.append(time.monotonic())
        os.kill(ranks[rank], number)

    try:
        trainer.train(size, at=AT, act=strike)
        reason = "the segment did not end"
    except ChildKilled as error:
        reason = error.message.partition("\n")[0]
    known = time.monotonic() - sent[0]
    assert all(gone(pid, 60) for pid in found)
    left = time.monotonic() - sent[0]
    words = re.sub(r"process \d+", "process …", reason)
    return {"signal": number.name, "rank": rank, "known": round(known, 1), "gone": round(left, 1), "reason": words}


def main() -> None:
    """Each signal to each rank, every time on a new run."""
    size = int(sys.argv[1]) if sys.argv[1:] else 3
    rows = []
    print("| signal | to rank | s until the task had the reason | s until all were gone | reason |")
    print("|---|---|---|---|---|")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for rank in range(size):
            with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
                begin(Path(folder))
                rows.append(lost(Trainer(Path(folder), patch), size, rank, number))
            print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    print(json.dumps({"ranks": size, "rows": rows}))


if __name__ == "__main__":
    main()
