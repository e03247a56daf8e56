"""Publishing that is killed at ten random points, and continued each time, ends as if nothing had happened."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
from pathlib import Path

from storage.release import RELEASE_KEY
from tests.flows.conftest import ROOT, command, verbatim
from tests.s3.faults import MOMENTS, Kill, number
from tests.s3.proxy import Proxy
from tests.s3.server import Server
from tests.s3.small_run import address, content

KILLS = 10


def publish(trained: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        arguments = command("publish", trained, "--target", address(name))
        return subprocess.Popen(arguments, cwd=ROOT, stdout=output, stderr=output)


def check(now: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """Whatever is there is there wholly; a release is there only with all that it lists."""
    odd = [key for key, data in now.items() if whole.get(key) != data and not key.startswith(".probe-")]
    assert not odd, f"not as published undisturbed: {odd}"
    assert RELEASE_KEY not in now or now.keys() >= whole.keys()


def test_killed_ten_times(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path
) -> None:
    seed, name, log = secrets.randbelow(10**6), tmp_path.name, tmp_path / "log.txt"
    print(f"seed {seed}")
    chance, within, kills = random.Random(seed), 3 * len(undisturbed), 0
    while kills < KILLS:
        point, moment = chance.randint(1, within), chance.choice(MOMENTS)
        proxy.no_faults()
        child = publish(trained, name, log)
        proxy.fault(Kill(moment, child.pid), when=number(point))
        status = child.wait(240)
        now = content(at_server, name)
        print(f"request {point}, {moment}: status {status}, {len(now)} of {len(undisturbed)} objects are there")
        check(now, undisturbed)
        if status == -signal.SIGKILL:
            kills += 1
        else:
            assert status == 0, log.read_text()
            within = point - 1  # it needed fewer requests
    proxy.no_faults()
    verbatim("publish", trained, "--target", address(name))
    now = content(at_server, name)
    assert {key: data for key, data in now.items() if not key.startswith(".probe-")} == undisturbed
    verbatim("verify", address(name))
