"""Chaos in its short form; and that it would see what it looks for, and counts no kill that came too late."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import checkpoint
from storage.errors import InputFault
from storage.figures import probe_key
from storage.ledger import HEADER_KEY, part_key
from storage.publish import publish
from tests.chaos.scene import INSIDE, ROOT, Scene
from tests.chaos.watch import Order, Watch
from tests.storage import small
from tests.storage.conftest import Small, flip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_eight_times_is_the_undisturbed_one() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.chaos", "--short"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 8 and len(result["head"]) == 64


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("scene") / "plain", "")
    made = Small(scene.folder)
    with small.stand_in():
        small.begin(scene.folder, made.store, made.mix)
        made.train(every=1)
        publish(made.store, made.mix, made.published, made.key)
    return scene


@pytest.fixture
def scene(plain: Scene, tmp_path: Path) -> Scene:
    """A second run that ended as the first did."""
    second = Scene(tmp_path / "second", "", plain)
    for part in ("run", "published"):
        shutil.copytree(plain.folder / part, second.folder / part)
    return second


def an_object(scene: Scene) -> Path:
    return scene.store.path(scene.store.list("objects/")[0])


DAMAGE: dict[str, Callable[[Scene], object]] = {
    "an entry is lost": lambda scene: scene.store.path(part_key(11)).unlink(),
    "an entry is there twice": lambda scene: scene.store.create(part_key(12), scene.store.read(part_key(11))),
    "an entry is another": lambda scene: flip(scene.store.path(part_key(7)), 100),
    "another ledger": lambda scene: flip(scene.store.path(HEADER_KEY), 100),
    "half a part of a checkpoint": lambda scene: an_object(scene).write_bytes(an_object(scene).read_bytes()[:-9]),
    "no part of a checkpoint": lambda scene: an_object(scene).unlink(),
    "a checkpoint too many": lambda scene: scene.store.create(checkpoint.checkpoint_key(13), b"{}"),
    "a release without an object": lambda scene: scene.target.path(scene.target.list("objects/")[0]).unlink(),
    "a published object that is another": lambda scene: flip(scene.target.path(part_key(3)), 50),
    "a held-out loss was never made": lambda scene: scene.store.path(probe_key(12)).unlink(),
    "no release": lambda scene: scene.target.path("RELEASE.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_chaos_sees_what_a_kill_could_do(scene: Scene, damage: str) -> None:
    scene.check_end()
    scene.before.clear()  # what was seen before would tell most of them
    DAMAGE[damage](scene)
    with pytest.raises((AssertionError, InputFault)):
        scene.check_end()


def test_chaos_sees_what_is_gone_in_the_middle_of_a_run(scene: Scene) -> None:
    for key in (checkpoint.checkpoint_key(12), "probe/00000012.json", part_key(11)):
        scene.store.delete(key)
    shutil.rmtree(scene.target.root)
    scene.check()
    scene.store.delete(part_key(10))
    with pytest.raises(AssertionError, match=r"lost or changed: \['ledger/00000010.jsonl'\]"):
        scene.check()


@pytest.fixture
def watch() -> Iterator[Watch]:
    with tempfile.TemporaryDirectory(prefix="watch-") as name:  # a socket's path must be short
        found = Watch(Path(name), random.Random(1))
        found.flow = os.getpid()
        yield found


DIGESTS = """
import time
import numpy as np
from kernels.digest import leaves_of
from model.group import ALONE
for _ in range(2):
    ALONE.digests({"a": np.zeros(9, np.float32)}, leaves_of, "gradient")
time.sleep({pause})
"""


def digests(watch: Watch, pause: float = 0) -> int:
    """A process that goes through the phase twice; its exit status."""
    path = os.pathsep.join((str(INSIDE), str(ROOT)))
    environment = os.environ | {"CHAOS_SOCKET": watch.address, "PYTHONPATH": path}
    command = [sys.executable, "-c", DIGESTS.replace("{pause}", str(pause))]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    time.sleep(0.3)
    return status


def test_a_kill_at_a_call_lands_in_its_phase(watch: Watch) -> None:
    watch.counting = True
    assert digests(watch) == 0 and watch.calls["digest"] > 20
    watch.counting = False
    for visit, share in ((1, 0.0), (2, 0.9)):
        watch.orders.append(Order("digest", "rank 0", "call", visit, share))
        assert digests(watch) == -9 and watch.kills[-1].landed and not watch.orders


def test_a_kill_that_comes_too_late_does_not_count(watch: Watch) -> None:
    watch.calls["digest"] = 100_000  # more than there are
    watch.orders.append(Order("digest", "rank 0", "call", 2, 0.5))
    assert digests(watch) == 0
    assert [kill.landed for kill in watch.kills] == [False] and watch.orders[0].share == 0.25
    watch.orders.clear()
    watch.seconds["digest"] = 6.0
    watch.orders.append(Order("digest", "rank 0", "time", 2, 0.5))  # after 3 s: even beside others the visit is over
    assert digests(watch, pause=8) == -9
    assert [kill.landed for kill in watch.kills] == [False, False] and watch.orders[0].how == "call"
