"""Kill a small run again and again, wherever it is, and demand the run that nobody disturbed: `python -m tests.chaos`.

    python -m tests.chaos [--short] [--seed N]

Runs of 12 steps, each step shared by 1, 2 or 3 processes (drawn at every start), go by the product's own commands
(`verbatim train`, `verbatim publish`: Prefect flow, task, torchrun, ranks). Each kill is a SIGKILL of a rank, of
torchrun or of the flow, inside a phase that is asked for. After every kill, and at the end, what lies in the store is
compared with a run that was trained by one process without a kill. Prints a table, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from flows import server
from tests.chaos.report import table
from tests.chaos.scene import Scene, recipes
from tests.chaos.watch import Kill, Order, Victim, Watch
from tests.tasks.test_process import gone

FULL = {"resume": 6, "step": 9, "digest": 6, "record": 6, "checkpoint": 8, "probe": 5, "publish": 12}
SHORT = {"step": 2, "digest": 1, "record": 1, "checkpoint": 2, "publish": 2}
VICTIMS: tuple[Victim, ...] = ("rank 0", "another rank", "launcher", "flow")
A_RUN = 20  # kills of one run's training at most, so that there are several runs
DRAWN = (1, 2, 2, 2, 3)  # processes of a segment; the short form has 2
UNASKED = 12  # times that a command may fail without a kill: those of a flow that was killed may hold the lease yet


def orders(asked: dict[str, int], draw: random.Random) -> list[Order]:
    """The kills, in random order; victims take turns. Few come early: one run has room for them."""
    found, latest = [], 3 if sum(asked.values()) > A_RUN else 1
    for phase, count in asked.items():
        for _ in range(count):
            visit = draw.randint(1, latest) if phase in ("step", "digest", "record") else 1
            how = draw.choice(("call", "time")) if phase in ("step", "publish", "resume") else "call"
            found.append(Order(phase, VICTIMS[len(found) % len(VICTIMS)], how, visit, draw.random()))
    draw.shuffle(found)
    return found


class Chaos:
    """The runs, one after another, until every kill has landed."""

    def __init__(self, folder: Path, asked: dict[str, int], seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.watch, self.recipes = Watch(folder, self.draw), recipes(folder / "recipe")
        drawn = orders(asked, self.draw)
        self.train = deque(order for order in drawn if order.phase != "publish")
        self.publish = deque(order for order in drawn if order.phase == "publish")
        self.sizes = DRAWN if asked is FULL else (2,)
        self.starts = self.runs = 0
        self.plain = Scene(folder / "plain", self.watch.address)

    def go(self) -> Iterator[str]:
        """Does everything; says how far it is."""
        self.watch.counting = True
        for verb in ("prepare", "train"):
            self.plain.do(verb, self.recipes[0], "--folder", self.plain.folder)
        self.plain.do("publish", self.plain.folder)
        self.watch.counting = False
        head = self.plain.run().ledger.head
        yield f"undisturbed, one process: head {head}; calls counted {self.watch.calls}"
        while self.train or self.publish:
            self.runs += 1
            scene = Scene(self.folder / f"run-{self.runs}", self.watch.address, self.plain)
            last = not len(self.train) > A_RUN
            self._through(scene, self.train, A_RUN)
            self._through(scene, self.publish, len(self.publish) if last and not self.train else 4)
            scene.check_end()
            landed, left = sum(kill.landed for kill in self.watch.kills), len(self.train) + len(self.publish)
            yield f"run {self.runs}: the same head; {landed} kills landed, {left} to come"

    def _through(self, scene: Scene, orders: deque[Order], most: int) -> None:
        """Train or publish to the end, killed on the way; what could not be carried out stays among the orders."""
        watch = self.watch
        taken = [orders.popleft() for _ in range(min(most, len(orders)))]
        verb = "publish" if orders is self.publish else "train"
        watch.orders = deque(taken)
        unasked, finished = 0, False
        while not finished:
            killed = len(watch.kills)
            size = self.draw.choice(self.sizes)
            what = (self.recipes[size], "--folder", scene.folder) if verb == "train" else (scene.folder,)
            command = scene.start(verb, *what)
            self.watch.flow, self.starts = command.pid, self.starts + 1
            self._attend(scene, command)
            finished = command.returncode == 0
            unasked = 0 if len(watch.kills) > killed else unasked + 1
            assert finished or unasked <= UNASKED, scene.said()
            time.sleep(2.0 if unasked else 0.0)
        orders.extendleft(reversed(watch.orders))
        watch.orders = deque()
        while watch.seen:
            assert gone(pid := watch.seen.pop(), 60), f"process {pid} outlived its flow"

    def _attend(self, scene: Scene, command: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the command; look at the store after every kill."""
        looked = len(self.watch.kills)
        try:
            while command.poll() is None:
                time.sleep(0.05)
                if len(self.watch.kills) > looked:
                    looked = len(self.watch.kills)
                    print(f"         {self.watch.kills[-1]}", flush=True)
                    scene.check()
            scene.check()
        finally:
            command.kill()


def main() -> None:
    """Print the table; exit with an error where anything was lost, doubled or half."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, server.running(Path(name) / "prefect"):
        chaos = Chaos(Path(name), SHORT if options.short else FULL, options.seed)
        kills: list[Kill] = chaos.watch.kills
        try:
            for line in chaos.go():
                print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)
        finally:
            print(table(kills), flush=True)
        head = chaos.plain.run().ledger.head
    landed = sum(kill.landed for kill in kills)
    result = {"head": head, "kills": landed, "missed": len(kills) - landed, "runs": chaos.runs, "starts": chaos.starts}
    print(json.dumps(result | {"seed": options.seed, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
