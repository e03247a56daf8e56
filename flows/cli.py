"""The command line, `verbatim`: every command explains itself with an example (`verbatim COMMAND --help`).

prepare, train and publish run as Prefect flows, so they have a history that `make serve` shows. An auditor needs no
Prefect: audit, sample, verify and doctor call plain functions.

Exit codes: 0 success, 1 failure, 2 wrong usage; an audit's verdict is 0 match, 10 no match, 11 a faulty input,
12 a faulty machine, 13 refused.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows import environment
from storage.errors import VerbatimError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
console = Console()
errors = Console(stderr=True)

RecipeArgument = Annotated[str, typer.Argument(help="A name in deployments/recipes, such as demo, or a YAML file.")]
FolderOption = Annotated[
    str, typer.Option(help="Where the run lives. Default: runs/ and the recipe's name, in the project.")
]
BackendOption = Annotated[str, typer.Option(help="cpu (fast) or reference (plain NumPy, slow); it changes no bit.")]
StoreArgument = Annotated[str, typer.Argument(help="The published run: a folder or file:// address.")]
RecordsOption = Annotated[Path, typer.Option(help="Folder for this machine's draws and certificates.")]
KeysOption = Annotated[Path, typer.Option(help="Folder of this machine's signing keys; made at first use.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

AUDITS = environment.PROJECT / "runs" / "audits"
KEYS = environment.PROJECT / "runs" / "keys"


@app.command()
def prepare(recipe: RecipeArgument, folder: FolderOption = "") -> None:
    """Cut a recipe's pinned text into windows, under one mix root.

    Example: verbatim prepare demo
    """
    from flows import history

    with history.recorded(console):
        from flows.prepare import prepare as flow

        mix = flow(_recipe(recipe), _absolute(folder))
    console.print(f"{mix.windows:,} windows in {mix.uri}\nmix root {mix.mix_root}", highlight=False)


@app.command()
def train(recipe: RecipeArgument, folder: FolderOption = "", backend: BackendOption = "cpu") -> None:
    """Train a prepared recipe, or go on from its newest checkpoint; repeated steps are compared with the ledger.

    Example: verbatim train demo
    """
    from flows import history

    with history.recorded(console):
        from flows.train import train as flow

        run = flow(_recipe(recipe), _absolute(folder), backend)
    console.print(f"{run.steps} steps in {run.uri}\ntrajectory root {run.trajectory_root}", highlight=False)


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="The run's folder, such as runs/demo.")],
    target: Annotated[str, typer.Option(help="Folder or file:// address. Default: published/ in the folder.")] = "",
) -> None:
    """Copy a run and its windows to a store, read every object back, and sign the release.

    Example: verbatim publish runs/demo --target /srv/public/demo
    """
    from flows import history

    with history.recorded(console):
        from flows.publish import publish as flow

        release = flow(str(folder.absolute()), target if "://" in target else _absolute(target))
    console.print(f"{release.objects} objects, {release.size / 1e6:,.0f} MB at {release.uri}", highlight=False)


@app.command()
def audit(
    store: StoreArgument,
    step: Annotated[int | None, typer.Option(min=0, help="The step to replay, from 0.")] = None,
    initial: Annotated[bool, typer.Option("--initial", help="Regenerate the initial state from its seed.")] = False,
    draw: Annotated[str, typer.Option(help="Date of the recorded draw that chose the step, e.g. 2026-11-29.")] = "",
    backend: BackendOption = "cpu",
    records: RecordsOption = AUDITS,
    keys: KeysOption = KEYS,
    as_json: JsonOption = False,
) -> None:
    """Replay one step from a published run, compare the whole ledger entry, and sign a certificate.

    Examples: verbatim audit runs/demo/published --step 17        verbatim audit runs/demo/published --initial
    """
    from storage.errors import UsageError
    from tasks import replay

    if initial == (step is not None):
        raise UsageError("give either --step NUMBER or --initial", next_step="verbatim audit --help")
    request = {"store": _absolute(store), "step": step, "draw": draw, "backend": backend}
    result = replay.audit(**request, records=str(records.absolute()), keys=str(keys.absolute()), report=_say(as_json))
    _show_verdict(result, as_json)
    raise typer.Exit(int(result["exit_code"]))


@app.command()
def sample(
    store: StoreArgument,
    beacon: Annotated[Path, typer.Option(help='File {"round":1,"scheme":"file","value":"<64 hex digits>"}.')],
    date: Annotated[str, typer.Option(help="Date of the draw; one draw a date. Default: today, UTC.")] = "",
    count: Annotated[int, typer.Option(min=1, help="How many steps to draw.")] = 1,
    records: RecordsOption = AUDITS,
    as_json: JsonOption = False,
) -> None:
    """Draw the steps of a date from a public random value, and record the draw before any audit starts.

    Example: verbatim sample runs/demo/published --beacon beacon.json --count 2
    """
    from storage.audit.draw import make_draw, read_beacon
    from storage.ledger import Ledger
    from storage.store import open_store

    day = date or datetime.now(UTC).date().isoformat()
    kept, ledger = open_store(str(records.absolute())), Ledger(open_store(_absolute(store)))
    made = make_draw(kept, ledger, day, read_beacon(beacon), count)
    if as_json:
        print(json.dumps({"date": made.date, "steps": made.steps, "record": made.digest()}))
    else:
        steps = ", ".join(str(step) for step in made.steps)
        console.print(f"draw of {made.date} (on the {made.basis}): steps {steps}", highlight=False)


@app.command()
def verify(
    store: StoreArgument,
    certificates: Annotated[list[Path] | None, typer.Argument(help="Certificates; none: the run itself.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check certificates, or with none given the published run itself: chain, signature, every object and entry.

    Nothing is replayed, so this says that records are genuine and consistent, not that the arithmetic was right.

    Example: verbatim verify runs/demo/published runs/audits/certificates/*.json
    """
    from flows import checks

    done = checks.certificates(_absolute(store), certificates) if certificates else checks.release(_absolute(store))
    if as_json:
        print(json.dumps(done))
    else:
        for line in done:
            console.print(f"genuine: {line['what']}: {line['says']}", highlight=False)


@app.command()
def doctor(backend: BackendOption = "cpu", as_json: JsonOption = False) -> None:
    """Check this installation and this machine: packages, versions, and every conformance vector.

    Example: verbatim doctor
    """
    from flows import checks

    found = checks.machine(backend)
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            console.print(f"{name}: {value}", highlight=False)


def _absolute(path: str) -> str:
    """Folders given on a command line are relative to where it was typed; flows and children run elsewhere."""
    return path if not path or "://" in path else str(Path(path).absolute())


def _recipe(name: str) -> str:
    return _absolute(name) if os.sep in name or name.endswith((".yaml", ".yml")) else name


def _say(quiet: bool) -> Any:
    return (lambda text: None) if quiet else (lambda text: console.print(text, highlight=False))


def _show_verdict(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    colour = "green" if result["exit_code"] == 0 else "red"
    label = str(result["verdict"]).upper()
    console.print(f"[bold {colour}]{label}[/] {result['piece']}: {result['detail']} ({result['seconds']:.1f} s)")
    if result["exit_code"]:
        console.print(f"  {result['explanation']}\n  next: {result['next']}", highlight=False)
    if result["certificate"]:
        console.print(f"certificate: {result['certificate']}", highlight=False)


def main() -> None:
    """Entry point: errors become one clear message and an exit code."""
    try:
        app(prog_name="verbatim")
    except VerbatimError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(error.exit_code)
    except Exception as error:
        log = environment.PROJECT / "runs" / "last-error.txt"
        log.parent.mkdir(exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
        errors.print(f"unexpected {type(error).__name__}: {error}\n  details: {log}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
