"""One contender's turn of `make bench-s3`, in a process that holds nothing else; prints what it took as JSON.

python -m tests.bench.s3_turn CONTENDER up|down FOLDER KEY DIGEST      the server is named by the environment
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from storage.copying import PIECE, Source, copy_all
from storage.store import LocalStore, S3Store
from tests.s3.server import BUCKET

OURS, COPIED, PEER = "verbatim", "verbatim, copied", "TransferManager"


class Pieces:
    """A file's bytes, read as they are taken."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece


def taken(act: Callable[[], Any]) -> dict[str, float]:
    """Seconds, processor seconds, and bytes of memory beside what this process had before."""
    before, began, processor_began = _memory("VmRSS"), time.perf_counter(), time.process_time()
    act()
    seconds, own = time.perf_counter() - began, time.process_time() - processor_began
    return {"seconds": seconds, "processor": own, "memory": _memory("VmHWM") - before}


def _memory(what: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) << 10


def ours(name: str, way: str, folder: Path, key: str, digest: str) -> Callable[[], Any]:
    """By our store, which has a client and knows its server already."""
    source, target = LocalStore(folder / "source"), LocalStore(folder / "target")
    store = S3Store.open(f"s3://{BUCKET}/bench")
    store.create(f"before/{key}-{way}", b"")
    if name == COPIED:
        if way == "up":
            return lambda: copy_all({key: Source(source, "object", digest)}, store)
        return lambda: copy_all({key: Source(store, key, digest)}, target)
    if way == "up":
        return lambda: store.create(key, Pieces(source.path("object")))
    return lambda: store.read(key, digest)


def peers(way: str, folder: Path, key: str) -> Callable[[], Any]:
    """By botocore's transfer manager, which has a client already."""
    from botocore.session import Session
    from s3transfer.manager import TransferManager

    client, target = Session().create_client("s3"), folder / "target" / key
    target.parent.mkdir(exist_ok=True)
    client.head_bucket(Bucket=BUCKET)

    def act() -> None:
        with TransferManager(client) as manager:
            if way == "up":
                manager.upload(str(folder / "source" / "object"), BUCKET, f"bench/{key}").result()
                return
            manager.download(BUCKET, f"bench/{key}", str(target)).result()
        with target.open("rb+") as file:
            os.fsync(file.fileno())

    return act


def main() -> None:
    """The turn that the command line names."""
    name, way, folder, key, digest = sys.argv[1:]
    act = peers(way, Path(folder), key) if name == PEER else ours(name, way, Path(folder), key, digest)
    print(json.dumps(taken(act)))


if __name__ == "__main__":
    main()
