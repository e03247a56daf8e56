"""Faults of parallel maps: results in the order in which they happened to be ready."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.corpus.pool import Done, Job, processes
from storage.corpus.prepare import prepare
from storage.store import LocalStore, MemoryStore, Store
from tests.storage.corpus.mixes import pin, prose, small, write_jsonl

SLEEPY = """
import os, random, time
draw, link, replace = random.Random(os.getpid()), os.link, os.replace

def late(real):
    def wait(*arguments, **named):
        time.sleep(draw.random() / 20)
        return real(*arguments, **named)
    return wait

os.link, os.replace = late(link), late(replace)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A mix of 50 documents in ten files, and its objects as one process makes them."""
    folder = tmp_path_factory.mktemp("alone")
    return made(folder, MemoryStore(str(folder)))


def made(folder: Path, store: Store, **how: Any) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(10):
        path = write_jsonl(folder / f"own-{number}.jsonl", [prose(5 * number + i, 30 + 7 * i) for i in range(5)])
        files.append(pin(path, kind="rows"))
    spec = small(folder, sources=[{"name": "s", "files": files}], held_out_windows=8, shard_windows=4)
    prepare(spec, folder / "cache", store, **how)
    return {key: store.read(key) for key in store.list()}


def test_workers_that_are_late_at_random(
    alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unordered map gave shards in the order of arrival: eight workers, each late by itself, give one's bytes."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with processes(8) as run:
        found = made(tmp_path / "made", LocalStore(tmp_path / "mix"), run=run, workers=8, sort_bytes=40_000)
    assert found == alone


@pytest.mark.parametrize("seed", [1, 2])
def test_jobs_in_any_order_and_twice(alone: dict[str, bytes], tmp_path: Path, seed: int) -> None:
    """The same without luck: jobs of a stage come in a drawn order, and some of them again when all are done."""
    draw = random.Random(seed)

    def run(stage: str, jobs: Sequence[Job], done: Done) -> None:
        for job in draw.sample(jobs, len(jobs)):
            job()
            done(job)
        for job in draw.sample(jobs, len(jobs) // 2):
            job()

    assert made(tmp_path, MemoryStore(str(tmp_path)), run=run, workers=8, sort_bytes=40_000) == alone
