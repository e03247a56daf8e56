"""Prepare one mix under many circumstances, and demand the same bytes: `make corpus`.

    python -m tests.corpus [short] [--recipe four_kinds] [--seed N] [--folder runs/corpus]

Each variant differs from the first in one thing: workers, the order in which folders list, locale and timezone,
PYTHONHASHSEED, the sort budget, and kills at drawn moments of drawn stages, after which the same command goes on. It
must end with the same mix root, and every object of the mix with the same bytes. `short`: the demo's mix, everything
else at once in one variant, and kills. Prints a table; exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from storage import recipe as recipes
from storage.corpus.fetch import pinned_files, read_pinned
from storage.provenance import PROJECT
from tasks.references import CACHE
from tests.corpus.scene import Outcome, Scene, Variant

KILLS = (
    Variant("everything killed three times", kills=("everything",) * 3),
    Variant("a worker killed, then another", kills=("one worker",) * 2),
    Variant("the directing process killed", kills=("the director",)),
)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "XXX+11:30"}
TURKISH, ELSEWHERE = "tr_TR.UTF-8", "NPT-5:45"  # its i and its decimal comma differ


def turkish(folder: Path) -> dict[str, str]:
    """The variables of a Turkish locale, made in `folder`; empty where this system has no sources of locales."""
    folder.mkdir(parents=True)
    command = ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(folder / TURKISH)]
    if shutil.which("localedef"):
        subprocess.run(command, capture_output=True, check=False)
    made = (folder / TURKISH / "LC_CTYPE").is_file()
    return {"LOCPATH": str(folder), "LC_ALL": TURKISH, "TZ": ELSEWHERE} if made else {}


def full(seed: int, locale: dict[str, str]) -> list[Variant]:
    """The first, and all that is compared with it."""
    found = [
        Variant("1 worker", workers=1),
        Variant("2 workers"),
        Variant("5 workers", workers=5),
        Variant("folders list in drawn orders", variables={"CORPUS_SHUFFLE": str(seed)}),
        Variant("locale C and ASCII, timezone 11:30 west", variables=ASCII),
        Variant("PYTHONHASHSEED 1", variables={"PYTHONHASHSEED": "1"}),
        Variant("sort budget 1 MB", sort_mb=1),  # of the others the workers alone decide how many runs there are
        Variant("sort budget 64 MB", sort_mb=64),
        Variant("sort budget 2 GB", sort_mb=2048),
        *KILLS,
    ]
    if locale:
        found.insert(5, Variant("Turkish locale, timezone 5:45 east", variables=locale))
    else:
        say("no localedef with sources of locales here (Debian's packages libc-bin and locales): no Turkish variant")
    return found


def short(seed: int, locale: dict[str, str]) -> list[Variant]:
    """Everything else at once, and the kills of everything."""
    other = {**(locale or ASCII), "PYTHONHASHSEED": "1", "CORPUS_SHUFFLE": str(seed)}
    every = Variant("5 workers, 1 MB, all else other", workers=5, sort_mb=1, variables=other)
    return [Variant("2 workers"), every, *KILLS[:2]]


def differences(base: Outcome, other: Outcome) -> list[str]:
    """The root, and each object that only one has or that has other bytes; none if the two are the same."""
    found = [] if base.root == other.root else [f"mix root {other.root}"]
    keys = sorted(base.objects.keys() | other.objects.keys())
    return found + [key for key in keys if base.objects.get(key) != other.objects.get(key)]


def say(line: str) -> None:
    """To a person who waits."""
    print(line, file=sys.stderr, flush=True)


def go(recipe: str, folder: Path, variants: list[Variant], draw: random.Random) -> bool:
    """Prepare every variant; the table. Whether all are the same."""
    print("| variant | s | memory of all processes, MB | sorted runs | mix root | objects that differ |")
    print("|---|---|---|---|---|---|")
    base: Outcome | None = None
    stages: dict[int, dict[str, float]] = {}  # by workers
    same, told, began = True, [], time.monotonic()
    for number, variant in enumerate(variants):
        found = Scene(recipe, folder / "variant", variant, draw).go(stages.get(variant.workers, {}))
        base = base or found
        stages.setdefault(variant.workers, found.stages)
        differs = differences(base, found)
        same = same and not differs
        figures = f"{found.seconds:.1f} | {found.memory / 1e6:,.0f} | {max(found.runs, 0)}"
        print(f"| {variant.name} | {figures} | {found.root[:16]} | {len(differs)} |", flush=True)
        told += [f"{variant.name}: {kill}" for kill in found.kills]
        told += [f"{variant.name}: {what} differs" for what in differs[:10]]
        left = (time.monotonic() - began) / (number + 1) * (len(variants) - number - 1)
        say(f"  {number + 1} of {len(variants)} variants; about {left / 60:.0f} min left")
    print("\n".join(["", *(f"- {line}" for line in told)]))
    print(f"\n{len(variants)} variants of {recipe}: {'the same bytes' if same else 'NOT THE SAME'}", flush=True)
    return same


def main() -> None:
    """Exit with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", nargs="?", choices=("full", "short"), default="full")
    parser.add_argument("--recipe", default="")
    parser.add_argument("--seed", type=int, default=1, help="of listings and kills")
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "corpus")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))
    recipe = asked.recipe or ("demo" if asked.form == "short" else "four_kinds")
    for file in (file for source in recipes.load(recipe).mix.sources for file in pinned_files(source)):
        read_pinned(file, CACHE)  # so that no variant fetches
    shutil.rmtree(asked.folder, ignore_errors=True)
    locale = turkish(asked.folder / "locale")
    variants = (short if asked.form == "short" else full)(asked.seed, locale)
    print(f"{recipe}, seed {asked.seed}\n")
    same = go(recipe, asked.folder, variants, random.Random(asked.seed))
    shutil.rmtree(asked.folder)
    sys.exit(not same)


if __name__ == "__main__":
    main()
