"""The command line, `verbatim`: every command explains itself with an example (`verbatim COMMAND --help`).

prepare, reproduce-mix, train and publish run as Prefect flows, so they have a history that `make serve` shows. An
auditor needs no Prefect: all other commands call plain functions.

Exit codes: 0 success, 1 failure, 2 wrong usage; an audit's verdict is 0 match, 10 no match, 11 a faulty input,
12 a faulty machine, 13 refused.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from flows import disputes, environment, evaluations, openings, trust
from flows.terminal import JsonOption, KeysOption, MirrorOption, StoreArgument, console
from flows.terminal import absolute as _absolute
from flows.terminal import all_absolute as _all_absolute
from flows.terminal import line as _line
from storage.errors import UsageError, VerbatimError, printable
from tasks.references import AUDITS, KEYS

if TYPE_CHECKING:
    from storage.audit.verdict import AuditProgress

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
errors = Console(stderr=True)

RecipeArgument = Annotated[str, typer.Argument(help="A name in deployments/recipes, such as demo, or a YAML file.")]
FolderOption = Annotated[
    str, typer.Option(help="Where the run lives. Default: runs/ and the recipe's name, in the project.")
]
BackendOption = Annotated[
    Literal["cpu", "nvidia", "reference"],
    typer.Option(
        help="cpu is fast, nvidia faster where there is an NVIDIA GPU, reference plain NumPy and slow; it changes no"
        " bit."
    ),
]
AnyBackendOption = Annotated[
    str,
    typer.Option(
        help="cpu, nvidia (an NVIDIA GPU), reference (plain NumPy, slow), or generic: and a torch device, as in"
        " generic:mps. With checked: before it, a backend asserts the contract's floors after every operation."
    ),
]
RecordsOption = Annotated[Path, typer.Option(help="Folder for this machine's draws and certificates.")]
SHOWN = 20  # bad copies that are printed


def _version(wanted: bool) -> None:
    if wanted:
        _line(f"verbatim {metadata.version('verbatim-audit-training')}")
        raise typer.Exit


@app.callback(help=__doc__)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """What every command has."""


@app.command()
def prepare(recipe: RecipeArgument, folder: FolderOption = "") -> None:
    """Cut a recipe's pinned text into windows.

    They are the same on every machine, and stand under one mix root.

    \b
    Example: verbatim prepare demo
    """
    from flows import history

    with history.recorded(console):
        from flows.prepare import prepare as flow

        mix = flow(_recipe(recipe), _absolute(folder))
    _line(f"{mix.windows:,} windows in {mix.uri}\nmix root {mix.mix_root}")


@app.command()
def reproduce_mix(
    recipe: RecipeArgument,
    published: Annotated[
        str,
        typer.Option(help="What to compare with: a published run, a run's folder or a mix. Default: one's own."),
    ] = "",
    folder: Annotated[
        str, typer.Option(help="The mix is made in rebuilt-mix/ below it. Default: runs/ and the recipe's name.")
    ] = "",
) -> None:
    """Make a recipe's windows anew and compare them.

    From the pinned text, in an empty folder. One root, or exit code 10 and the first source, file and window that
    differ, with the versions that could explain it. Of what is published the manifest is enough; its index and leaves
    let documents and windows be named.

    \b
    Example: verbatim reproduce-mix demo --published /srv/public/demo --folder /tmp/again
    """
    from flows import history

    with history.recorded(console):
        from flows.reproduce_mix import reproduce_mix as flow

        mix = flow(_recipe(recipe), _absolute(published), _absolute(folder))
    _line(f"the same mix: {mix.windows:,} windows made anew in {mix.uri}\nmix root {mix.mix_root}")


@app.command()
def train(recipe: RecipeArgument, folder: FolderOption = "", backend: BackendOption = "cpu") -> None:
    """Train a prepared recipe, or go on with it.

    Goes on from the newest whole checkpoint; steps that the ledger already has are repeated and compared. The recipe's
    plan.processes says how many processes share each step, which changes no bit. Refused while another trains the run.

    \b
    Example: verbatim train demo
    """
    from flows import history

    with history.recorded(console):
        from flows.train import train as flow

        run = flow(_recipe(recipe), _absolute(folder), backend)
    _line(f"{run.steps} steps in {run.uri}\ntrajectory root {run.trajectory_root}")


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="The run's folder, such as runs/demo.")],
    target: Annotated[
        str, typer.Option(help="Folder, file:// or s3:// address. Default: published/ in the folder.")
    ] = "",
    records: Annotated[
        str, typer.Option(help="An auditor's records: draws and certificates of this run are published with it.")
    ] = "",
) -> None:
    """Copy a run to a store, read it back, sign it.

    Ledger, checkpoints, windows, the code, the last weights for plain code, and a page that shows it all. Nothing that
    is there already is overwritten; after an interruption the same command goes on.

    For s3:// the environment names server and keys, or ~/.aws does: AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_PROFILE. An address never holds a key.

    \b
    Examples: verbatim publish runs/demo --target /srv/public/demo
              AWS_PROFILE=lab verbatim publish runs/demo --target s3://bucket/demo
    """
    from flows import history

    to, kept = _absolute(target), _absolute(records)
    with history.recorded(console):
        from flows.publish import publish as flow

        release = flow(str(folder.absolute()), to, kept)
    _line(f"{release.steps} steps, {release.objects} objects, {release.size / 1e6:,.0f} MB at {release.uri}")
    _line(f"next: verbatim verify {shlex.quote(release.uri)}")


@app.command()
def audit(
    store: StoreArgument,
    step: Annotated[int | None, typer.Option(min=0, help="The step to replay, from 0.")] = None,
    initial: Annotated[bool, typer.Option("--initial", help="Regenerate the initial state from its seed.")] = False,
    unit: Annotated[int | None, typer.Option(min=0, help="Of an opened step: one unit's gradient alone.")] = None,
    sum_: Annotated[bool, typer.Option("--sum", help="Of an opened step: do the units make the gradient?")] = False,
    update: Annotated[bool, typer.Option("--update", help="Of an opened step: one parameter's update.")] = False,
    draw: Annotated[str, typer.Option(help="Date of the recorded draw that chose the step, e.g. 2026-11-29.")] = "",
    backend: AnyBackendOption = "cpu",
    records: RecordsOption = AUDITS,
    keys: KeysOption = KEYS,
    mirror: MirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay one step, or a part of it, and compare it with the ledger.

    Needs the published run alone. Compares the whole entry and signs a certificate. Of a step that was opened, a unit,
    the sum and the update can be audited alone, each in a fraction of the time; each proves its part.

    Of several copies, what is bad in one is reported and taken from another. What comes from s3:// is kept in
    ~/.cache/verbatim, up to 10 GB, and verified at each use: VERBATIM_CACHE names another folder, or none;
    VERBATIM_CACHE_GB another limit.

    \b
    Examples: verbatim audit runs/demo/published --step 17
              verbatim audit runs/demo/published --initial
              verbatim audit s3://first/demo --mirror s3://second/demo --step 17
              verbatim audit runs/demo/published --step 17 --unit 1 --draw 2026-11-29
    """
    parts = [f"unit {unit}"] * (unit is not None) + ["sum"] * sum_ + ["update"] * update
    if initial == (step is not None):
        raise UsageError("give either --step NUMBER or --initial", next_step="verbatim audit --help")
    if initial and draw:
        raise UsageError("--draw names a draw of steps; the initial state is not drawn", next_step="leave --draw out")
    if len(parts) > 1 or (parts and (initial or not draw)):
        raise UsageError(
            "--unit, --sum and --update are parts of a step, one at a time, and need the draw that it was opened for",
            next_step=f"verbatim audit {store} --step {step or 0} --{parts[0]} --draw DATE",
        )
    from tasks import pieces, replay  # late: torch takes seconds, which wrong usage need not

    kept, signing, copies = str(records.absolute()), str(keys.absolute()), _all_absolute(mirror)
    address, report = _absolute(store), _say(as_json)
    if parts:
        result = pieces.audit(address, f"step {step} {parts[0]}", draw, backend, kept, signing, report, copies)
    else:
        result = replay.audit(address, step, draw, backend, kept, signing, report, copies)
    _show_verdict(result, as_json)
    raise typer.Exit(int(result["exit_code"]))


@app.command()
def verify(
    store: StoreArgument,
    certificates: Annotated[
        list[Path] | None, typer.Argument(help="Records of audits, of any kind; none: the run itself.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Replay the certificates' steps and make each proof of replay again.")
    ] = False,
    backend: AnyBackendOption = "cpu",
    mirror: MirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check certificates and other records of audits, or a published run.

    Without any: the run's chain, signature, every object, window and checkpoint, what each entry says against spec and
    mix, and what came after it was signed: openings and records of audits.

    Nothing is replayed, so this says that records are genuine and consistent, not that the arithmetic was right. With
    --replay it also finds whoever signed a certificate without having replayed the step.

    \b
    Examples: verbatim verify runs/demo/published runs/audits/certificates/*.json
              verbatim verify runs/demo/published stranger.json --replay
    """
    if replay and not certificates:
        raise UsageError("--replay needs certificates", next_step="verbatim verify --help")
    copies = [_absolute(store), *_all_absolute(mirror)]
    from flows import checks

    if certificates:
        done = checks.records(copies, certificates, (backend, _say(as_json)) if replay else None)
    else:
        done = checks.release(copies)
    if as_json:
        print(json.dumps(done))
    else:
        for line in done:
            if "says" in line:
                _line(f"genuine: {line['what']}: {line['says']}")
        _show_bad([line for line in done if "wrong" in line])


@app.command()
def docs(
    store: Annotated[
        str, typer.Argument(help="A published run, a run's folder or a mix: a folder, file:// or s3:// address.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Which documents did this step see?")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Which are in this window of the stream?")] = None,
    doc: Annotated[str, typer.Option(help="Which steps saw the document with this id, and what does it say?")] = "",
    search: Annotated[str, typer.Option(help="Which documents hold this text? Reads every window.")] = "",
    mirror: MirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask which documents a step saw, and which steps saw a document.

    With the text that the windows hold. All but --search read from the store only the windows that they show.

    \b
    Examples: verbatim docs runs/demo/published --step 17
              verbatim docs runs/demo/published --search "Whipple bicycle"
              verbatim docs runs/demo/published --doc math/train/1234
    """
    from flows.docs import ask, lines

    answer = ask([_absolute(store), *_all_absolute(mirror)], step, window, doc, search, _read_so_far(as_json))
    if as_json:
        print(json.dumps(answer))
    else:
        for line in lines(answer):
            _line(line)
        _show_bad(answer["bad_copies"])


@app.command()
def doctor(
    backend: AnyBackendOption = "cpu",
    recipe: Annotated[str, typer.Option(help="Say instead what a recipe's pieces of work take of memory.")] = "",
    run: Annotated[
        str, typer.Option(help="The same of a run, published or not: a folder, file:// or s3:// address.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check this installation and this machine.

    Packages, versions, and every conformance vector; or, before starting, what a unit, a step and training take of
    memory, the machine's with the cpu backend or a GPU's with nvidia, and by which plan this machine would do them.

    \b
    Examples: verbatim doctor
              verbatim doctor --recipe open_1b
              verbatim doctor --backend nvidia --recipe open_1b
    """
    from flows import checks

    if recipe or run:
        _show_memory(checks.memory(_recipe(recipe), _absolute(run), backend), as_json)
        return
    found = checks.machine(backend, lambda text: None if as_json else _dim(text))
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            each = value.items() if isinstance(value, dict) else ()
            _line(f"{name}: {', '.join(f'{part} {number}' for part, number in each) or value}")
        _line("this machine is fit to audit")


def _show_memory(pieces: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(pieces))
        return
    for found in pieces:
        verdict = "fits" if found["fits"] else "does not fit"
        worth = {purpose: size / 1e9 for purpose, size in found["by_purpose"].items() if size >= 5e6}
        sizes = ", ".join(f"{purpose} {size:,.2f}" for purpose, size in worth.items())
        files = f"; on disk {found['on_disk'] / 1e9:,.2f} GB" if found["on_disk"] else ""
        files += f"; beside it {found['on_host'] / 1e9:,.2f} GB of the machine's memory" if found["on_host"] else ""
        _line(f"{found['what']}: {verdict}: {found['takes'] / 1e9:,.2f} GB of {found['available'] / 1e9:,.2f}{files}")
        _line(f"  {sizes}")
        if found["piece"] != "initial":
            _line(f"  plan: {found['plan']}")


def _recipe(name: str) -> str:
    return _absolute(name) if os.sep in name or name.endswith((".yaml", ".yml")) else name


def _say(quiet: bool) -> Callable[[AuditProgress], None]:
    """Prints where an audit is; on standard error, so that the verdict alone is the output."""

    def say(progress: AuditProgress) -> None:
        step = "" if progress.step is None else f" {progress.step}"
        left = "" if progress.seconds_left is None else f", about {progress.seconds_left:.0f} s left"
        _dim(f"{progress.stage}{step}{left}")

    return (lambda progress: None) if quiet else say


def _dim(text: str) -> None:
    errors.print(text, style="dim", highlight=False, soft_wrap=True)


def _read_so_far(quiet: bool) -> Callable[[int, int], None]:
    """Shows how far a search is, on standard error, where a person watches it."""

    def say(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{done:,} of {total:,} windows searched", end=end, file=sys.stderr, flush=True)

    return say if sys.stderr.isatty() and not quiet else lambda done, total: None


def _show_verdict(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    colour = "green" if result["exit_code"] == 0 else "red"
    label = str(result["verdict"]).upper()
    console.print(f"[bold {colour}]{label}[/] {result['piece']} ({result['seconds']:.1f} s)", highlight=False)
    _line(f"  {result['detail']}")
    if result["exit_code"]:
        _line(f"  {result['explanation']}")
        if "\n  next: " not in result["detail"]:
            _line(f"  next: {result['next']}")
    if result["certificate"]:
        _line(f"certificate: {result['certificate']}")
    _show_bad(result["bad_copies"])


def _show_bad(copies: list[dict[str, str]]) -> None:
    for copy in copies[:SHOWN]:
        _line(f"bad copy: {copy['store']}: {copy['key']}: {copy['wrong']}")
    if (more := len(copies) - SHOWN) > 0:
        _line(f"and {more} more: --json lists them all")


disputes.register(app, _say, _show_verdict)
trust.register(app)
openings.register(app, _say)
evaluations.register(app, _say, _show_verdict)


def main() -> None:
    """Entry point: errors become one clear message and an exit code."""
    try:
        app(prog_name="verbatim")
    except VerbatimError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:
            errors.print("stopped")
        raise
    except Exception as error:
        text = printable(f"unexpected {type(error).__name__}: {error}\n  details: {_keep(traceback.format_exc())}")
        errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _keep(details: str) -> str:
    """Where the details now lie, or why nowhere."""
    log = environment.PROJECT / "runs" / "last-error.txt"
    try:
        log.parent.mkdir(exist_ok=True)
        log.write_text(details, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"{log} cannot be written: {error.strerror}"
    return str(log)


if __name__ == "__main__":
    main()
