"""A small run under chaos: its folder, the commands that go on with it, and what must be true of it at any moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from storage import checkpoint
from storage.classes import RUN_CLASSES, class_of
from storage.figures import probe_key
from storage.ledger import HEADER_KEY, Ledger
from storage.release import RELEASE_KEY, check_objects, load_release
from storage.run import RECIPE_KEY, Run, open_release, open_run
from storage.store import LocalStore
from storage.stream import Stream
from tests.flows import tiny

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"
WORLDS = (1, 2, 3)
STEPS, EVERY = 12, 2  # a checkpoint every 2 steps
WINDOWS = 4  # of a step: some ranks of three have one, some two


def recipes(folder: Path) -> dict[int, Path]:
    """A recipe for each number of processes, and 0 for the undisturbed run: it has a checkpoint after every step, since
    others make one wherever they are asked to stop. They differ in the plan alone, so they are of one run."""
    plain = yaml.safe_load(tiny.recipe(folder).read_text())
    phases = [{"from_tokens": 0, "windows": WINDOWS}]
    plain["run"]["schedule"] |= {"total_tokens": STEPS * WINDOWS * 128, "phases": phases}
    found = {}
    for size in (0, *WORLDS):
        every = EVERY if size else 1
        ends = [4, 8] if size else []
        plan = {"checkpoint_every": every, "diagnostics_every": 3, "segment_ends": ends, "processes": max(1, size)}
        found[size] = folder / f"by_{size}.yaml"
        found[size].write_text(yaml.safe_dump(plain | {"plan": plan}))
    return found


class Scene:
    """One folder with the run's windows, its store and its release."""

    def __init__(self, folder: Path, address: str, plain: Scene | None = None) -> None:
        self.folder, self.address, self.plain = folder, address, plain
        self.store, self.target = LocalStore(folder / "run"), LocalStore(folder / "published")
        self.before: dict[str, bytes] = {}
        folder.mkdir(parents=True)
        if plain:
            shutil.copytree(plain.folder / "mix", folder / "mix")

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Begin a command of the product, in which every process speaks to the tester."""
        path = os.pathsep.join((str(INSIDE), str(ROOT)))
        environment = os.environ | {"CHAOS_SOCKET": self.address, "PYTHONPATH": path}
        command = [sys.executable, "-m", "flows.cli", *map(str, arguments)]
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def do(self, *arguments: str | Path) -> None:
        """A command from beginning to end, which must succeed."""
        assert self.start(*arguments).wait() == 0, self.said()

    def said(self) -> str:
        """The end of what the commands wrote."""
        return (self.folder / "log.txt").read_text(errors="replace")[-4000:]

    def run(self) -> Run:
        """The run, its whole ledger verified."""
        return open_run(self.store, Stream.open(LocalStore(self.folder / "mix")))

    def lasting(self) -> dict[str, bytes]:
        """Every object of the run but those that say who trained it, when and how."""
        passing = ("segments/", "lease/", RECIPE_KEY)
        keys = [key for key in self.store.list() if not key.startswith(passing)]
        return {key: self.store.read(key) for key in keys}

    def check(self) -> None:
        """What must hold at every moment, also while others write: one ledger, which only grows and is the undisturbed
        run's as far as it goes; every checkpoint that can be seen whole; nothing else than what that run has too."""
        assert self.plain is not None
        now, expected = self.lasting(), self.plain.lasting()
        assert self.before.items() <= now.items(), f"lost or changed: {sorted(self.before.keys() - now.keys())}"
        self.before = now
        odd = sorted(key for key, data in now.items() if data != expected.get(key))
        assert not odd, f"not the undisturbed run's: {odd}"
        if HEADER_KEY in now:
            ledger = Ledger(self.store)
            assert [entry.step for entry in ledger] == list(range(len(ledger)))
            for step in checkpoint.steps(self.store):
                checkpoint.check(self.store, ledger, step)
        self._check_release()

    def _check_release(self) -> None:
        """What lies in the target is the run's, whole; signed only if all of it is there."""
        for key in self.target.list():
            if class_of(key) in RUN_CLASSES:
                assert self.target.read(key) == self.store.read(key), f"{key} was published otherwise"
        if RELEASE_KEY in self.target.list():
            check_objects(self.target, load_release(self.target, open_release(self.target).ledger))

    def check_end(self) -> None:
        """The run is the undisturbed one, object by object; so is what is published."""
        assert self.plain is not None
        self.check()
        ours, theirs = self.lasting(), self.plain.lasting()
        lacking = {
            key for key in theirs.keys() - ours.keys() if not key.startswith(("checkpoints/", "objects/", "probe/"))
        }
        assert not lacking, f"lost: {sorted(lacking)}"
        asked = range(0, STEPS + 1, EVERY)
        due = {checkpoint.checkpoint_key(step) for step in asked} | {probe_key(step) for step in asked}
        assert due <= ours.keys(), f"never made: {sorted(due - ours.keys())}"
        assert self.run().ledger.head == self.plain.run().ledger.head
        assert RELEASE_KEY in self.target.list()
