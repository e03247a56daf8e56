"""The commands of sampling and trust: sample, witness, coverage, next. cli.py registers them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.terminal import JsonOption, KeysOption, StoreArgument, absolute, line, with_records
from storage.errors import InputFault
from tasks.references import AUDITS, KEYS

DRAND = "https://api.drand.sh"
RecordsOption = Annotated[str, typer.Option(help="Folder or address of statements, draws and certificates.")]

ManyRecordsOption = Annotated[
    list[str] | None,
    typer.Option("--records", help="Folder or address of records; several times. Default: this machine's."),
]
NamedOption = Annotated[
    Path | None, typer.Option(help='File of the keys that you count: lines of "<64 hex digits> <name>".')
]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (sample, witness, coverage):
        app.command()(command)
    app.command("next")(next_step)


def sample(
    store: StoreArgument,
    beacon: Annotated[
        str, typer.Option(help='A drand server, or a file {"round":1,"scheme":"file","value":"<64 hex digits>"}.')
    ] = DRAND,
    count: Annotated[int, typer.Option(min=1, help="How many steps to draw.")] = 1,
    records: RecordsOption = str(AUDITS),
    keys: KeysOption = KEYS,
    as_json: JsonOption = False,
) -> None:
    """Draw which steps to audit: today's, as the run's trainer.

    States the ledger's head and a beacon's round to come, for a witness to sign; called again once the round is out, it
    draws. Earlier nights without a statement are recorded as missed. A file's value is known before: such a draw is the
    trainer's word. Exit code 11: an earlier night that was stated could not be drawn, which counts against the run.

    \b
    Examples: verbatim sample runs/demo/published --count 2
              verbatim sample runs/demo/published --beacon beacon.json
    """
    from flows import sampling

    source = beacon if "://" in beacon else absolute(beacon)
    done = sampling.sample(absolute(store), source, count, absolute(records), keys.absolute())
    _show(done, sampling.sample_lines(done, store), as_json)
    raise typer.Exit(InputFault.exit_code if done["undrawn"] else 0)


def witness(
    store: StoreArgument,
    statements: Annotated[str, typer.Option(help="Where the trainer's statements lie. Default: the records.")] = "",
    records: RecordsOption = str(AUDITS),
    keys: KeysOption = KEYS,
    as_json: JsonOption = False,
) -> None:
    """Sign that you saw a run's statements before their rounds.

    Witnesses every statement whose round is still to come, and keeps a copy, so that none can be exchanged or dropped
    once its draw is known. For someone else than the trainer; every few minutes, from cron.

    \b
    Example: verbatim witness runs/demo/published --statements s3://trainer/records
    """
    from flows import sampling

    kept = absolute(records)
    done = sampling.witness(absolute(store), absolute(statements) or kept, kept, keys.absolute())
    _show(done, sampling.witness_lines(done), as_json)
    raise typer.Exit(max((row["exit_code"] for row in done), default=0))


def coverage(
    store: StoreArgument,
    records: ManyRecordsOption = None,
    named: NamedOption = None,
    page: Annotated[Path | None, typer.Option(help="File to write the same to, as a page for a browser.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run's audits amount to.

    Every drawn step with its state, what counts against the run, which steps were audited, and what so many audits
    prove. Exit code 11: something counts against the run; 10: a named key found no match.

    \b
    Examples: verbatim coverage runs/demo/published --named keys.txt
              verbatim coverage runs/demo/published --named keys.txt --page report.html
    """
    from flows import coverage as reports

    found = reports.report(absolute(store), _all(records), named, page)
    _show(found, reports.report_lines(found), as_json)
    raise typer.Exit(found["exit_code"])


def next_step(
    store: StoreArgument,
    records: ManyRecordsOption = None,
    named: NamedOption = None,
    keys: KeysOption = KEYS,
    as_json: JsonOption = False,
) -> None:
    """Name the drawn step that you should audit.

    By hash of your key and the step, among those that are not confirmed, so that many auditors spread without anyone
    who assigns them.

    \b
    Example: verbatim next runs/demo/published
    """
    from flows import coverage as reports

    found = reports.next_for(absolute(store), _all(records), named, keys.absolute())
    _show(found, reports.next_lines(found, store, with_records((records or [""])[0])), as_json)


def _all(records: list[str] | None) -> list[str]:
    return [absolute(address) for address in records or [str(AUDITS)]]


def _show(done: Any, lines: Iterable[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(done))
    else:
        for text in lines:
            line(text)
