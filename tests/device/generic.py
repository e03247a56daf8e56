"""On a machine with an accelerator: conformance of the generic backend there, and a few steps against the
reference.

    python tests/device/generic.py [torch device, default cuda]

From the repository's root, with torch, numpy and blake3; pydantic and mpmath too for the steps. Prints one JSON
line, and exits 1 where a vector or a step differs.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore", category=RuntimeWarning)  # vectors hold values that are not finite

import kernels  # noqa: E402
from kernels import conformance  # noqa: E402

STEPS = 5


def vectors(name: str) -> dict[str, Any]:
    """Which vectors differ, and how long all took."""
    start = time.monotonic()
    backend = kernels.backend(name)
    expected = conformance.vectors()
    failing = {case: got for case, got in conformance.run(backend) if got != expected[case]}
    return {
        **backend.describe(),
        "vectors": len(expected),
        "failing": failing,
        "vector_seconds": round(time.monotonic() - start, 2),
    }


def steps(name: str) -> dict[str, Any]:
    """Whether some small runs have the reference's trajectory, and the fastest step of each."""
    from model import schedule  # pydantic may be missing here
    from model.spec import NumericsSpec
    from model.state import initial_state
    from model.step import step
    from tests.model import tiny

    def trajectory(run: Any, backend_name: str) -> tuple[list[tuple[Any, ...]], float]:
        backend = kernels.backend(backend_name)
        state, records, times = initial_state(run, backend), [], []
        for _ in range(STEPS):
            plan = schedule.plan(run, state.step)
            start = time.monotonic()
            record = step(run, backend, state, tiny.windows(run, plan.first_window, plan.windows), diagnose=True)
            times.append(time.monotonic() - start)
            records.append((record.state, record.gradient, record.loss, record.z_loss, record.grad_norm))
        return records, min(times)

    gradients = {"input_gradient_slices": 2, "weight_gradient_slices": 2}
    every_option = NumericsSpec(weight_scale="lsq", **gradients, down_slices=2, unit_windows=2)
    runs = {
        "tiny": tiny.spec(steps=STEPS),
        "every option": tiny.spec(steps=STEPS, numerics=every_option),
        "full length": tiny.spec(seq_len=4096, windows=1, steps=STEPS, window=512, layers=2),
    }
    report = {}
    for label, run in runs.items():
        (expected, _), (got, seconds) = trajectory(run, "reference"), trajectory(run, name)
        report[label] = {"same": got == expected, "step_seconds": round(seconds, 3), "state": got[-1][0]}
    return report


def main() -> int:
    """Run both parts and print the report."""
    name = f"generic:{sys.argv[1] if len(sys.argv) > 1 else 'cuda'}"
    report = vectors(name)
    try:
        report["steps"] = steps(name)
    except ImportError as error:
        report["steps"] = {"not run": {"same": None, "why": str(error)}}
    print(json.dumps(report))
    return int(bool(report["failing"]) or any(run["same"] is False for run in report["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
