"""`make bench-corpus`: a whole preparation beside HF `tokenizers` alone and datatrove's tokenization, on two cores.

    python -m tests.bench.corpus [--recipe four_kinds] [--rounds 2] [--cores 2] [--folder runs/bench-corpus]
    python -m tests.bench.corpus access              microseconds from (seed, step) to windows, of 110 million

    verbatim            prepare(): pinned files in the cache → verified → documents → ids, globally shuffled, held-out
                        documents chosen, windows, leaves, index, manifest, in an empty folder, every object synced
    verbatim, trained   the same, with the tokenizer trained as well
    tokenizers          encode_batch alone, of texts in memory
    datatrove           the documents, taken out before, from Parquet → ids in its files; no shuffle

All use one tokenizer.json, have the same cores and run in processes of their own, in turns; a ratio is the median of
the rounds' own ratios. The peers' ids are compared with those in our windows.

Prints a report in Markdown, then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from storage import recipe as recipes
from storage.corpus.fetch import pinned_files
from storage.provenance import PROJECT
from storage.store import LocalStore, object_digest
from storage.stream import Stream
from tests.bench import corpus_access
from tests.bench.corpus_input import Texts, compare, write_texts
from tests.bench.cpu import _processor as processor
from tests.bench.cpu import ratio

CONTENDERS, RULES = (__doc__ or "").split("\n\n")[2:4]  # which a report says, too
PEERS = PROJECT / "runs" / "peers"  # their environment
HERE = Path(__file__).resolve().parent
PINS, PEER = HERE / "corpus_peers.txt", HERE / "corpus_peers.py"
OURS, TRAINED = "verbatim", "verbatim, trained"
NAMES = (OURS, TRAINED, "tokenizers", "datatrove")
LIBRARIES = ("fastokens", "tokenizers", "pyarrow", "numpy", "blake3")
PROBE, PROBES = 256 << 20, 3  # bytes and times, for the disk's and BLAKE3's rates


def peers() -> Path:
    """The Python of the peers' environment, which is made at first."""
    python, done = PEERS / "venv" / "bin" / "python", PEERS / "installed"
    if not done.is_file() or done.read_bytes() != PINS.read_bytes():
        say("the peers' environment: a minute, once")
        subprocess.run([sys.executable, "-m", "venv", "--clear", PEERS / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", PINS], check=True)
        shutil.copyfile(PINS, done)
    return python


def say(line: str) -> None:
    """To a person who waits."""
    print(f"  {line}", file=sys.stderr, flush=True)


class Race:
    """The contenders, in turns. Each leaves its result in <folder>/<name>."""

    def __init__(self, recipe: str, folder: Path, cores: int) -> None:
        self.recipe, self.folder, self.cores = recipe, folder, cores
        self.python, self.tokenizer = peers(), folder / "tokenizer.json"
        say(f"documents of {recipe} as Parquet")
        self.texts: Texts = write_texts(recipes.load(recipe).mix, folder / "texts")
        self.said: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}

    def take(self, name: str) -> None:
        """One turn; notes what the process said, and how long it took from its start to its end."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        if name in (OURS, TRAINED):
            given = "-" if name == TRAINED else self.tokenizer
            module = "tests.bench.corpus_ours"
            command = [sys.executable, "-m", module, self.recipe, out, str(self.cores), given]
        else:
            out.mkdir()
            command = [self.python, PEER, name, self.texts.folder, self.tokenizer, out]
        os.sync()  # nobody pays for what another one wrote
        began = time.perf_counter()
        with (self.folder / "log.txt").open("ab") as log:
            done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=log, check=False)
        whole = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{(self.folder / 'log.txt').read_text(errors='replace')[-3000:]}")
        self.said[name].append({**json.loads(done.stdout.splitlines()[-1]), "whole": whole})
        if name == TRAINED:
            shutil.copyfile(out / "tokenizer.json", self.tokenizer)

    def seconds(self, name: str, what: str = "seconds") -> list[float]:
        """Of every turn."""
        return [said[what] for said in self.said[name]]

    def stages(self) -> dict[str, float]:
        """Seconds of ours, by stage: medians."""
        turns = [said["stages"] for said in self.said[OURS]]
        return {stage: statistics.median(turn[stage] for turn in turns) for stage in turns[0]}

    def compared(self) -> dict[str, int]:
        """Documents whose ids are the peer's and ours."""
        stream = Stream.open(LocalStore(self.folder / OURS))
        return {peer: compare(self.texts, stream, peer, self.folder / peer) for peer in NAMES[2:]}


def rates(folder: Path) -> dict[str, float]:
    """Bytes a second, the best of a few: written to the disk of `folder` and synced, read from it, digested."""
    data, path = os.urandom(PROBE), folder / "probe"
    found: dict[str, list[float]] = {"write": [], "read": [], "digest": []}
    for _ in range(PROBES):
        began = time.perf_counter()
        with path.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
            found["write"].append(time.perf_counter() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for what, act in (("read", path.read_bytes), ("digest", lambda: object_digest(data))):
            began = time.perf_counter()
            act()
            found[what].append(time.perf_counter() - began)
    path.unlink()
    return {what: PROBE / min(seconds) for what, seconds in found.items()}


def floor(race: Race) -> dict[str, float]:
    """Bytes of the pinned files and of all that was written, and the seconds to read, to write and to digest those."""
    spec = recipes.load(race.recipe).mix
    read = sum({file.sha256: file.size for source in spec.sources for file in pinned_files(source)}.values())
    written = sum(path.stat().st_size for path in (race.folder / OURS).rglob("*") if path.is_file())
    rate = rates(race.folder)
    seconds = read / rate["read"] + written / rate["write"] + written / rate["digest"]
    return {"read_bytes": read, "written_bytes": written, **rate, "seconds": seconds}


def report(race: Race, rounds: int, compared: dict[str, int], least: dict[str, float]) -> dict[str, Any]:
    """Prints the page; what the JSON line says of it."""
    tokens, size, count = race.said[OURS][0]["tokens"], race.texts.size, len(race.texts.addresses)
    versions = {name: version(name) for name in LIBRARIES} | {"datatrove": race.said["datatrove"][0]["version"]}
    machine = {"processor": processor(), "cores": race.cores, "python": platform.python_version(), "versions": versions}
    print(f"# Preparing a mix beside HF tokenizers and datatrove, {datetime.date.today()}\n")
    print(f"{processor()}, {race.cores} cores; load {os.getloadavg()[0]:.1f} at the end. Python {machine['python']},")
    print(f"{', '.join(f'{name} {number}' for name, number in versions.items())}.\n")
    print(f"`python -m tests.bench.corpus --recipe {race.recipe} --rounds {rounds}`: {size:,} bytes of text in")
    print(f"{count:,} documents, {tokens:,} tokens with those that end a text.\n")
    print(f"{CONTENDERS}\n\n{RULES}\n")
    print("| | s, median (each) | process, s | MB/s | tokens/s | ours is faster, times |\n|---|---|---|---|---|---|")
    rows = [_row(race, name, size, tokens) for name in NAMES]
    moved = (("read", "read_bytes"), ("write", "written_bytes"), ("digest", "written_bytes"))
    parts = [f"{what} {least[size] / 1e6:,.1f} MB at {least[what] / 1e6:,.0f} MB/s" for what, size in moved]
    times = statistics.median(race.seconds(OURS)) / least["seconds"]
    print(f"\nFloor: {', '.join(parts)}: {least['seconds']:.2f} s. Ours takes {times:.1f} times that.")
    stages = race.stages()
    each = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in stages.items())
    print(f"Its stages, each to the beginning of the next: {each}.")
    same = " and ".join(f"{number:,} documents of {peer}" for peer, number in compared.items())
    print(f"The same ids as in our windows: {same}.")
    roots = {name: race.said[name][0]["root"] for name in (OURS, TRAINED)}
    known = {"stages": stages, "bytes": size, "documents": count, "tokens": tokens, "roots": roots}
    return {"machine": machine, **known, "race": rows, "floor": least, "same": compared}


def _row(race: Race, name: str, size: int, tokens: int) -> dict[str, Any]:
    seconds, whole = race.seconds(name), statistics.median(race.seconds(name, "whole"))
    median, times = statistics.median(seconds), ratio(seconds, race.seconds(OURS))
    each = ", ".join(f"{second:.2f}" for second in seconds)
    rate = f"{size / 1e6 / median:.1f} | {tokens / median:,.0f}"
    print(f"| {name} | {median:.2f} ({each}) | {whole:.2f} | {rate} | {times:.2f} |")
    return {"name": name, "seconds": seconds, "whole": whole, "times": times}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("throughput", "access"), default="throughput")
    parser.add_argument("--recipe", default="four_kinds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "bench-corpus")
    return parser.parse_args()


def main() -> None:
    """Throughput, or access alone."""
    asked = arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])  # of all the processes below, too
    if asked.what == "access":
        print(json.dumps({"access": corpus_access.measured()}))
        return
    shutil.rmtree(asked.folder, ignore_errors=True)
    race = Race(asked.recipe, asked.folder, asked.cores)
    turns = [(number, name) for number in range(asked.rounds) for name in (TRAINED, OURS, *NAMES[2:])]
    began = time.perf_counter()
    for done, (number, name) in enumerate(turns, 1):
        race.take(name)
        taken, left = race.said[name][-1]["seconds"], (time.perf_counter() - began) / done * (len(turns) - done)
        say(f"round {number + 1} of {asked.rounds}: {name} {taken:.2f} s; about {left:.0f} s left")
    result = report(race, asked.rounds, race.compared(), floor(race))
    print("\n## From (seed, step) to windows\n")
    print(f"\n{json.dumps({**result, 'access': corpus_access.measured()})}")
    shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
