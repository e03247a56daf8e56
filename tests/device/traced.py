"""On a machine with a GPU: a step's trace, and each unit's gradient, are the reference's there too.

    python tests/device/traced.py [backend …, default nvidia generic:cuda cpu]

From the repository's root, with torch, numpy, numba, blake3, pydantic and mpmath. Prints one JSON line for each backend
and memory plan, and exits 1 where something differs: an auditor with a GPU and one without must narrow a dispute down
to the same operation, and must agree on a unit.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore", category=RuntimeWarning)

import kernels  # noqa: E402
from kernels.traced import Operation, Traced, first_difference  # noqa: E402
from model.memory import KEEP_ALL, MemoryPlan  # noqa: E402
from model.state import initial_state  # noqa: E402
from model.step import each_unit, step  # noqa: E402
from tests.model import tiny  # noqa: E402

RUN = tiny.spec(seq_len=256, windows=4)
PLANS = (KEEP_ALL, MemoryPlan(recompute=1, hold_codes=False), MemoryPlan(recompute=2))


def traced(name: str, plan: MemoryPlan) -> tuple[str, list[Operation]]:
    """(state root, trace) of the run's first step."""
    backend = kernels.backend(name)
    state = initial_state(RUN, kernels.backend("reference")).placed(backend.to_device)
    trace = Traced(backend, state.weights)
    return step(RUN, trace, state, tiny.windows(RUN, 0, 4), memory=plan).state, trace.trace()


def units(name: str) -> list[Any]:
    """Losses and gradient of each unit, as bytes."""
    backend, found = kernels.backend(name), []
    weights = initial_state(RUN, kernels.backend("reference")).placed(backend.to_device).weights
    for unit in each_unit(RUN, backend, weights, tiny.windows(RUN, 0, 4)):
        sums = {key: backend.to_host(array).tobytes() for key, array in sorted(unit.sums.items())}
        found.append((unit.nll, unit.lse2, sums))
    return found


def main() -> None:
    """Compare every named backend with the reference."""
    names, plain = sys.argv[1:] or ["nvidia", "generic:cuda", "cpu"], "reference"
    expected, wanted, wrong = traced(plain, KEEP_ALL), units(plain), False
    for name in names:
        began = time.monotonic()
        same = units(name) == wanted
        print(json.dumps({"backend": name, "units": len(wanted), "same": same}), flush=True)
        wrong |= not same
        for plan in PLANS:
            found = traced(name, plan)
            difference = first_difference(found[1], expected[1])
            row = {"backend": name, "plan": str(plan), "operations": len(found[1]), "same": found == expected}
            row |= {"first": str(difference), "seconds": round(time.monotonic() - began, 1)}
            print(
                json.dumps(row | {"first": str(difference), "seconds": round(time.monotonic() - began, 1)}), flush=True
            )
            wrong |= found != expected
    sys.exit(wrong)


if __name__ == "__main__":
    main()
