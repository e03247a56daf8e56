"""`make demo`: the whole chain on this computer, small and real, with one training process killed on purpose.

Raw text from pinned packages → windows → three training segments (the second is killed hard within a step; the
third repeats its last steps and compares them) → a published run → audits in other processes from that run alone →
certificates, verified in yet another. The result stands in runs/demo/summary.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flows import environment, history
from flows.processes import PeakMemory, family
from storage import recipe as recipes
from storage.account import Account, account, unigram_entropy
from storage.errors import Divergence, VerbatimError
from storage.ledger import part_key
from storage.store import open_store
from storage.stream import Stream

if TYPE_CHECKING:
    from flows.pipeline import Chain

RECIPE = "demo"
LEARNED = 0.5  # nats by which training must beat the held-out windows' own token frequencies
# What every run of the demo gives, whatever the machine, its threads and its instructions.
EXPECTED = recipes.RECIPES / "demo.expected.json"
FOLDER = environment.PROJECT / "runs" / "demo"
KILL_IN_STEP = 23
INTO_THE_STEP = 0.2  # seconds after the step before it was recorded

console = Console()


class Killer(threading.Thread):
    """Ends the training process with SIGKILL while it computes step KILL_IN_STEP: nothing can be tidied up."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._entry = run / part_key(KILL_IN_STEP - 1)
        self.killed = False

    def run(self) -> None:
        """Wait for the ledger entry of the step before, then strike once."""
        while not self._entry.exists():
            time.sleep(0.1)
        time.sleep(INTO_THE_STEP)
        for process in family():
            if "tasks.segment" in process.command:
                os.kill(process.pid, signal.SIGKILL)
                self.killed = True
                console.print(f"[yellow]Killed the training process {process.pid} in step {KILL_IN_STEP}.[/]")


def main() -> None:
    """Run it all; exit code as of the command line's verdicts."""
    began = time.monotonic()
    console.print(f"[bold]verbatim[/]: from raw text to audited steps, in {FOLDER}", highlight=False)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with PeakMemory() as memory, history.recorded(console) as url:
        started = time.monotonic()
        console.print(f"Prefect's UI, while this runs: {url.removesuffix('/api')}", highlight=False)
        from flows.pipeline import pipeline

        killer = Killer(FOLDER / "run")
        killer.start()
        chain = pipeline(RECIPE, str(FOLDER))
        piped = time.monotonic()
        _verify(chain)
    seconds = {"server": started - began} | chain.seconds | {"verify": time.monotonic() - piped}
    seconds["total"] = time.monotonic() - began
    found = account(open_store(chain.run.uri))
    _write_summary(chain, found, seconds, memory.gigabytes)
    entropy = unigram_entropy(Stream.open(open_store(chain.mix.uri)).held_out()[:, 1:])
    _show(chain, found, seconds, memory.gigabytes, entropy)
    _check(found, killer, entropy)


def _verify(chain: Chain) -> None:
    """Check every certificate as a stranger would: another process, the published run, nothing else."""
    paths = [audited.certificate for audited in chain.audits if audited.certificate]
    command = [sys.executable, "-m", "flows.cli", "verify", chain.release.uri, *paths]
    done = subprocess.run(command, cwd=environment.PROJECT, capture_output=True, text=True)
    if done.returncode:
        raise VerbatimError(f"a certificate was not accepted:\n{done.stderr}")


def _write_summary(chain: Chain, found: Account, seconds: dict[str, float], memory: float) -> None:
    audits = [
        {"step": "initial" if a.step is None else a.step, "verdict": a.verdict, "seconds": round(a.seconds, 2)}
        for a in chain.audits
    ]
    summary = {
        "mix_root": found.mix_root,
        "initial_root": found.initial_root,
        "trajectory_root": found.trajectory_root,
        "ledger_head": found.ledger_head,
        "steps": found.steps,
        "losses": found.losses,
        "held_out": {str(step): loss for step, loss in found.held_out.items()},
        "validated_steps": found.validated,
        "audits": audits,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "peak_memory_gb": round(memory, 3),
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _show(chain: Chain, found: Account, seconds: dict[str, float], memory: float, entropy: float) -> None:
    held_out = [loss for loss in found.held_out.values() if loss is not None]
    lines = [
        ("windows", f"{chain.mix.windows:,}"),
        ("held-out loss", f"{held_out[0]:.3f} → {held_out[-1]:.3f} nats in {found.steps} steps"),
        ("unigram entropy", f"{entropy:.3f} nats: what token frequencies alone would give there"),
        ("killed", f"in step {KILL_IN_STEP}; steps {', '.join(map(str, found.validated))} repeated: equal"),
        *((f"audit, {a.piece}", f"{a.verdict.upper()} in {a.seconds:.0f} s") for a in chain.audits),
        ("certificates", f"{len(chain.audits)} verified, from the published run alone"),
        ("time", ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())),
        ("memory", f"at most {memory:.1f} GB"),
        ("mix root", found.mix_root),
        ("trajectory root", found.trajectory_root),
        ("summary", f"{FOLDER}/summary.json; the same in a browser: make serve"),
    ]
    for name, text in lines:
        # Never folded: roots are copied from here.
        console.print(f"[bold]{name:15}[/] {escape(text)}", highlight=False, soft_wrap=True)


def _check(found: Account, killer: Killer, entropy: float) -> None:
    last = found.held_out[found.steps]
    if last is None or last > entropy - LEARNED:
        raise VerbatimError(
            f"the held-out loss is {last} nats; it was to end {LEARNED} below the unigram entropy of {entropy:.3f}",
            cause="the recipe was changed for the worse",
        )
    if not killer.killed or KILL_IN_STEP - 1 not in found.validated:
        raise Divergence(
            f"the training process was to be killed in step {KILL_IN_STEP} and its last steps repeated; "
            f"killed: {killer.killed}, repeated: {found.validated}",
            cause="a step takes less than a fifth of a second here, so the process was past it",
        )
    for name, expected in json.loads(EXPECTED.read_text(encoding="utf-8")).items():
        if (root := getattr(found, name)) != expected:
            raise Divergence(
                f"this run's {name} is {root}, everywhere else it is {expected}",
                cause="the recipe, the sources or the arithmetic were changed; or this machine computes wrongly",
                next_step=f"verbatim doctor; after a change that is meant, write the new roots into {EXPECTED}",
            )
    console.print("[bold green]The roots are those of every other machine.[/]")


if __name__ == "__main__":
    try:
        main()
    except VerbatimError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.print("stopped; `make demo` starts afresh")
        sys.exit(128 + signal.SIGINT)
