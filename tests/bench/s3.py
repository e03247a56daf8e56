"""`make bench-s3`: an object of 1 GB to a server and back, through our store and through botocore's transfer manager.

    python -m tests.bench.s3 [--size 1000000000] [--rounds 3] [--folder runs/bench-s3]

    verbatim            S3Store.create of a file's pieces, until the server's checksum proves the object; S3Store.read
                        into memory, verified by its digest
    verbatim, copied    copy_all from a folder and to a folder: digested on the way, synced, read back and compared
    TransferManager     s3transfer's: upload of a file, download to a file, which is then synced

All by the same server, SeaweedFS on loopback, in processes of their own, in turns; a ratio is the median of the rounds'
own ratios. Memory is the most that the process held beside what was loaded before; processor is seconds of the process
and, beside it, of the server, which neighbours on the machine change least.

Prints a report in Markdown, then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from storage.copying import PIECE
from storage.provenance import PROJECT
from storage.store import LocalStore, object_digest
from tests.bench.cpu import _processor as processor
from tests.bench.cpu import ratio
from tests.bench.s3_turn import COPIED, OURS, PEER, Pieces
from tests.s3.server import SEAWEEDFS, seaweedfs

CONTENDERS, RULES = (__doc__ or "").split("\n\n")[2:4]  # which a report says, too
NAMES, WAYS = (OURS, COPIED, PEER), ("up", "down")
PROBE, PROBES = 256 << 20, 3  # bytes and times, for the floor's rates
_TICKS = os.sysconf("SC_CLK_TCK")


class Race:
    """The contenders, in turns, with one server."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        blocks = [os.urandom(1 << 20) for _ in range(size >> 20)] + [os.urandom(size % (1 << 20))]
        LocalStore(folder / "source").create("object", blocks)
        self.digest = object_digest(blocks)
        self.said: dict[tuple[str, str], list[dict[str, float]]] = {(n, w): [] for n in NAMES for w in WAYS}

    def take(self, name: str, way: str, number: int, environment: dict[str, str]) -> None:
        """One turn; notes what the process said, and the server's own seconds."""
        shutil.rmtree(self.folder / "target", ignore_errors=True)
        os.sync()  # nobody pays for what another one wrote
        key = f"{name.replace(', ', '-')}-{number}"
        command = [sys.executable, "-m", "tests.bench.s3_turn", name, way, self.folder, key, self.digest]
        before = _children()
        done = subprocess.run(
            command, cwd=PROJECT, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        said = json.loads(done.stdout.splitlines()[-1])
        self.said[name, way].append({**said, "server": _children() - before})
        if name == PEER and way == "down" and self.digest != object_digest(Pieces(self.folder / "target" / key)):
            raise SystemExit(f"{key} came down with other bytes")

    def of(self, name: str, way: str, what: str) -> list[float]:
        """Of every turn."""
        return [said[what] for said in self.said[name, way]]

    def cost(self, name: str, way: str) -> list[float]:
        """Processor seconds of client and server."""
        return [said["processor"] + said["server"] for said in self.said[name, way]]


def _children() -> float:
    """Processor seconds of this process's children that run: between turns, the server."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in listed]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS


def floor(folder: Path) -> dict[str, float]:
    """Bytes a second, the best of a few: what any client must do, or may, while the machine is as busy as it is."""
    data, path = os.urandom(PROBE), folder / "probe"
    acts: dict[str, Callable[[], Any]] = {
        "TCP over loopback": lambda: _loopback(data),
        "write and sync": lambda: _written(path, data),
        "read": path.read_bytes,
        "CRC-32": lambda: zlib.crc32(data),
        "SHA-256": lambda: hashlib.sha256(data).digest(),
        "MD5": lambda: hashlib.md5(data, usedforsecurity=False).digest(),
        "BLAKE3": lambda: object_digest(data),
    }
    best = {what: min(_seconds(act) for _ in range(PROBES)) for what, act in acts.items()}
    path.unlink()
    return {what: PROBE / seconds for what, seconds in best.items()}


def _seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _written(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def _loopback(data: bytes) -> None:
    """From one thread to another over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        thread = threading.Thread(target=lambda: (sender.sendall(data), sender.close()))
        thread.start()
        receiver, _ = server.accept()
        with receiver:
            room = memoryview(bytearray(PIECE))
            while receiver.recv_into(room):
                pass
        thread.join()


def report(race: Race, rounds: int, rates: dict[str, float]) -> dict[str, Any]:
    """Prints the page; what the JSON line says of it."""
    versions = {name: version(name) for name in ("botocore", "s3transfer")} | {SEAWEEDFS[0]: SEAWEEDFS[1]}
    print(f"# To a server and back, beside botocore's transfer manager, {datetime.date.today()}\n")
    print(f"{processor()}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} at the end. ", end="")
    print(f"Python {platform.python_version()},\n{', '.join(f'{n} {v}' for n, v in versions.items())}.\n")
    print(f"`python -m tests.bench.s3 --size {race.size} --rounds {rounds}`\n\n{CONTENDERS}\n\n{RULES}\n")
    print("| | | s, median (each) | MB/s | processor, s | server, s | memory, MB | rate, × peer | cost, × peer |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = [_row(race, name, way) for way in WAYS for name in NAMES]
    print("\nOn the same machine, the best of a few, MB/s:", end=" ")
    print(", ".join(f"{what} {rate / 1e6:,.0f}" for what, rate in rates.items()) + ".")
    return {"versions": versions, "bytes": race.size, "rounds": rounds, "race": rows, "floor": rates}


def _row(race: Race, name: str, way: str) -> dict[str, Any]:
    middle = {what: statistics.median(race.of(name, way, what)) for what in ("seconds", "processor", "server")}
    times = ratio(race.of(PEER, way, "seconds"), race.of(name, way, "seconds"))
    cost = 1 / ratio(race.cost(PEER, way), race.cost(name, way))
    turns = {what: race.of(name, way, what) for what in middle}
    memory, seconds = max(race.of(name, way, "memory")), turns["seconds"]
    each = ", ".join(f"{second:.1f}" for second in seconds)
    print(
        f"| {way} | {name} | {middle['seconds']:.1f} ({each}) | {race.size / 1e6 / middle['seconds']:.0f} | "
        f"{middle['processor']:.1f} | {middle['server']:.1f} | {memory / 1e6:.0f} | {times:.2f} | {cost:.2f} |"
    )
    return {"name": name, "way": way, **turns, "memory": memory, "times": times, "cost": cost}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "bench-s3")
    return parser.parse_args()


def main() -> None:
    """The race."""
    asked = arguments()
    shutil.rmtree(asked.folder, ignore_errors=True)
    race = Race(asked.size, asked.folder)
    with seaweedfs(asked.folder / "server") as server:
        race.take(PEER, "up", -1, server.environment())  # the server makes room for its first objects
        race.said[PEER, "up"].clear()
        for number in range(asked.rounds):
            order = NAMES if number % 2 == 0 else NAMES[::-1]
            for way in WAYS:
                for name in order:
                    race.take(name, way, number, server.environment())
                    seconds = race.said[name, way][-1]["seconds"]
                    print(f"  round {number + 1} of {asked.rounds}: {way}, {name} {seconds:.1f} s", file=sys.stderr)
    result = report(race, asked.rounds, floor(asked.folder))
    print(f"\n{json.dumps(result)}")
    shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
