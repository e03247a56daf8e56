"""One preparation in a process that others may kill: `python -m tests.corpus.one RECIPE FOLDER WORKERS SORT_MB`.

The mix comes to FOLDER/mix; downloads and pieces lie in FOLDER/cache. Says "at <stage> <done> <total>", and "root
<mix root>" at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from storage import recipe as recipes
from storage.corpus.pool import processes
from storage.corpus.prepare import prepare
from storage.store import LocalStore


def main(recipe: str, folder: str, workers: str, sort_mb: str) -> None:
    """Prepare, or go on."""
    spec = recipes.load(recipe).mix
    with processes(int(workers)) as run:
        cache, store = Path(folder, "cache"), LocalStore(Path(folder, "mix"))
        manifest = prepare(spec, cache, store, say, run, int(workers), int(sort_mb) << 20)
    print("root", manifest.root, flush=True)


def say(what: str, done: int, total: int) -> None:
    """To whoever watches."""
    print("at", what, done, total, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
