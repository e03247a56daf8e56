"""What Prefect costs: the demo's chain as flows, and the same tasks called plainly, in turns.

    python -m tests.bench.overhead [--recipe NAME] [--rounds N]

Each in a process and a folder of its own, the flows beside a server that runs already, the tasks without one. Time is
counted from the call to its return: what a flow has to send at its end is in it, and what its server takes; neither
imports nor the server's start are, which is printed beside them. Both audit the same steps, which nobody draws: what a
step costs depends on its distance from a checkpoint. Fetch the sources before (`verbatim prepare demo`). Prints a line
for each and the share, then a line of JSON; exit code 1 beyond 3 %.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flows import server
from tasks.references import places

LIMIT = 0.03  # of the wall time
AUDITED = (20, 21)  # the two cost what one and two steps cost
ROOT = Path(__file__).resolve().parents[2]


def as_flows(recipe: str, folder: Path) -> float:
    """Seconds of the pipeline."""
    from flows.audit import audit
    from flows.pipeline import pipeline

    audits = places(recipe, str(folder)).audits
    began = time.monotonic()
    release = pipeline(recipe, str(folder), "cpu", 0).release
    for step in AUDITED:
        audit(release.uri, step, "cpu", audits)
    return time.monotonic() - began


def plainly(recipe: str, folder: Path) -> float:
    """Seconds of the functions below the same tasks, with nobody who listens."""
    from storage import recipe as recipes
    from tasks import audit, prepare, progress, publish, show, train

    def nothing(*_: Any, **__: Any) -> None:
        """Where an artifact would be made."""

    for module in (prepare, progress, show, train, audit):
        for name in ("create_markdown_artifact", "create_table_artifact"):
            if hasattr(module, name):
                setattr(module, name, nothing)
        if hasattr(module, "get_run_logger"):
            module.get_run_logger = logging.getLogger
    progress.Progress._send = nothing
    prepare._tracked = lambda run, stage, jobs, done: run(stage, jobs, done)
    audit.turn = train.turn = lambda backend: nullcontext()
    where = places(recipe, str(folder))
    began = time.monotonic()
    prepare.prepare_mix(recipe, where.mix)
    train.begin_run.fn(recipe, where.mix, where.run, "cpu")
    for end in recipes.load(recipe).stops():
        train.train_segment.fn(recipe, where.run, where.mix, end, "cpu")
    train.report_run.fn(where.run)
    publish.publish_run.fn(where.run, where.mix, where.published)
    audit.audit_step.fn(where.published, None, "cpu", where.audits)
    for step in AUDITED:
        audit.audit_step.fn(where.published, step, "cpu", where.audits)
    return time.monotonic() - began


def measured(how: str, recipe: str) -> float:
    """Seconds, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.overhead", "--recipe", recipe, "--child", how, folder]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return float(done.stdout.splitlines()[-1])


@contextmanager
def _served() -> Iterator[None]:
    began = time.monotonic()
    with server.running():
        print(f"server: started in {time.monotonic() - began:.1f} s", flush=True)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", nargs=2, metavar=("HOW", "FOLDER"))
    given = parser.parse_args()
    if given.child:
        how, folder = given.child
        print({"flows": as_flows, "plainly": plainly}[how](given.recipe, Path(folder) / "run"))
        return
    seconds: dict[str, list[float]] = {"flows": [], "plainly": []}
    beside = {"flows": _served, "plainly": nullcontext}
    for _ in range(given.rounds):
        for how, found in seconds.items():
            with beside[how]():
                found.append(measured(how, given.recipe))
            print(f"{how}: {found[-1]:.1f} s", flush=True)
    best = {how: min(found) for how, found in seconds.items()}
    share = best["flows"] / best["plainly"] - 1
    print(f"Prefect costs {share:.2%} of the best time of each")
    print(json.dumps({"recipe": given.recipe, "seconds": seconds, "share": share}))
    sys.exit(share > LIMIT)


if __name__ == "__main__":
    main()
