"""The commands of sampling and trust: sample. cli.py registers them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from flows.terminal import JsonOption, KeysOption, StoreArgument, absolute, line
from tasks.references import AUDITS, KEYS

DRAND = "https://api.drand.sh"
RecordsOption = Annotated[str, typer.Option(help="Folder or address of statements, draws and certificates.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (sample,):
        app.command()(command)


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
    trainer's word.

    \b
    Examples: verbatim sample runs/demo/published --count 2
              verbatim sample runs/demo/published --beacon beacon.json
    """
    from flows import sampling

    source = beacon if "://" in beacon else absolute(beacon)
    done = sampling.sample(absolute(store), source, count, absolute(records), keys.absolute())
    _show(done, sampling.sample_lines(done, store), as_json)


def _show(done: Any, lines: Iterable[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(done))
    else:
        for text in lines:
            line(text)
