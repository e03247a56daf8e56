"""Two steps of the tiny model in a process of its own: prints the digests of the second step's record as JSON.

python -m tests.faults.whole_step BACKEND VARIABLES     VARIABLES: JSON, set once everything is imported
"""

from __future__ import annotations

import json
import os
import sys

import kernels
from model import schedule
from model.spec import RunSpec
from model.state import initial_state
from model.step import StepRecord, step
from tests.model import tiny


def record(name: str, run: RunSpec | None = None) -> StepRecord:
    """The second step's record."""
    run, b = run or tiny.spec(), kernels.backend(name)
    state = initial_state(run, b)
    for _ in range(2):
        plan = schedule.plan(run, state.step)
        last = step(run, b, state, tiny.windows(run, plan.first_window, plan.windows))
    return last


def digests(found: StepRecord) -> list[str | None]:
    """What must be the same everywhere."""
    return [found.state, found.gradient, found.loss, found.grad_norm]


if __name__ == "__main__":
    kernels.backend(sys.argv[1])
    os.environ |= json.loads(sys.argv[2])
    print(json.dumps(digests(record(sys.argv[1]))))
