"""One whole preparation in a process of its own: `python -m tests.bench.corpus_ours RECIPE FOLDER WORKERS TOKENIZER`.

From pinned files in the cache to the manifest in the empty folder FOLDER; TOKENIZER: a tokenizer.json, or "-" for the
one that the recipe trains. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

from storage import recipe as recipes
from storage.corpus.pool import processes
from storage.corpus.prepare import prepare
from storage.store import LocalStore
from tasks.references import CACHE
from tests.bench.corpus_input import pinned


def main(recipe: str, folder: str, workers: str, tokenizer: str) -> None:
    """Prepare and say how long it took."""
    spec = recipes.load(recipe).mix
    if tokenizer != "-":
        spec = pinned(spec, Path(tokenizer))
    began = time.perf_counter()
    stages: dict[str, float] = {}

    def note(what: str, done: int, total: int) -> None:
        stages.setdefault(what, time.perf_counter())

    with processes(int(workers)) as run:
        manifest = prepare(spec, CACHE, LocalStore(Path(folder)), note, run, int(workers))
    ended = time.perf_counter()
    each = [end - begin for begin, end in pairwise([*stages.values(), ended])]
    parts = [part for source in manifest.mix.sources for part in (source.train, source.held_out)]
    tokens = sum(part.tokens for part in parts)
    print(
        json.dumps(
            {"seconds": ended - began, "stages": dict(zip(stages, each)), "tokens": tokens, "root": manifest.root}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
