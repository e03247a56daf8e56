"""One row of the conformance table, in a process of its own: vectors and a short trajectory under one setting.

    python -m tests.conformance.row BACKEND THREADS FLUSH     prints one JSON line

The instruction set is limited from outside, by the variables that oneDNN, MKL, torch and Numba read when they start.
"""

import json
import sys
from typing import Any

import torch

STEPS = 12


def main(backend_name: str, threads: int, flush: bool) -> dict[str, Any]:
    """{vectors that differ, trajectory root over STEPS steps of the tiny model, what the backend says of itself}."""
    torch.set_num_threads(threads)
    if flush and not torch.set_flush_denormal(True):  # before Numba starts its threads, which inherit it
        raise SystemExit("this processor cannot flush subnormals")
    import kernels
    from kernels import conformance
    from model import schedule
    from model.state import initial_state, root
    from model.step import step
    from storage.ledger import trajectory_root
    from tests.model import tiny

    backend = kernels.backend(backend_name)
    failing = conformance.self_test(backend)
    run = tiny.spec(steps=STEPS)
    state = initial_state(run, backend)
    first, roots = root(state)[0], []
    for _ in range(STEPS):
        plan = schedule.plan(run, state.step)
        roots.append(step(run, backend, state, tiny.windows(run, plan.first_window, plan.windows)).state)
    return {"failing": failing, "trajectory": trajectory_root(first, roots), "describe": backend.describe()}


if __name__ == "__main__":
    name, threads, flush = sys.argv[1:]
    print(json.dumps(main(name, int(threads), flush == "flush")))
