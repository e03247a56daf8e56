"""`tasks.segment` with a rank that is slow, stuck or fails, as the request's `fault` says; hasty: no test need wait.

{"rank": 1, "kind": "slow"}     it takes 0.2 s longer for a step
{"rank": 1, "kind": "stuck"}    in step 5 it works for an hour
{"rank": 1, "kind": "fails"}    in step 5 it raises an error
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from storage import engine, lease, watch
from tasks import segment

watch.LEAST, watch.GRACE, lease.EVERY = 3.0, 5, 0.05
_fault, _step = json.loads(sys.argv[1])["fault"], engine.step


def step(spec: Any, backend: Any, state: Any, *arguments: Any, **options: Any) -> Any:
    """The step, by a rank that has the fault."""
    if _fault["rank"] == int(os.environ.get("RANK", 0)):
        if _fault["kind"] == "fails" and state.step == 5:
            raise ValueError("the device is out of order")
        time.sleep(0.2 if _fault["kind"] == "slow" else 3600 if state.step == 5 else 0)
    return _step(spec, backend, state, *arguments, **options)


if __name__ == "__main__":
    if _fault["rank"] is not None:
        engine.step = step
    segment.main()
