"""The command that opens a drawn step, so that it can be audited in pieces. cli.py registers it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.terminal import JsonOption, StoreArgument, absolute, line, with_records
from tasks.references import AUDITS

if TYPE_CHECKING:
    from storage.audit.verdict import Report

BackendOption = Annotated[str, typer.Option(help="By which backend it is made; verbatim audit lists them.")]
RecordsOption = Annotated[Path, typer.Option(help="Folder for this machine's draws, and for units that are done.")]


def register(app: typer.Typer, say: Callable[[bool], Report]) -> None:
    """Add the command to the program. say: shows progress, or is quiet."""

    @app.command(name="open")
    def open_(
        store: StoreArgument,
        step: Annotated[int, typer.Option(min=0, help="The step that was drawn.")],
        draw: Annotated[str, typer.Option(help="Date of the recorded draw that chose it, e.g. 2026-11-29.")],
        backend: BackendOption = "cpu",
        records: RecordsOption = AUDITS,
        as_json: JsonOption = False,
    ) -> None:
        """Open a drawn step, so that others can audit it in pieces.

        Replays up to it, and publishes in opened/ below the same address the states before and after, each checked
        against the ledger, and the fingerprints of its units. Anyone can do it, and it comes out the same; after an
        interruption, again.

        \b
        Example: verbatim open runs/demo/published --step 17 --draw 2026-11-29
        """
        from tasks import pieces

        opened = pieces.open_drawn(absolute(store), step, draw, backend, str(records.absolute()), say(as_json))
        if as_json:
            print(json.dumps(opened))
            return
        units = opened["units"]
        line(f"step {step} is open: {units} units, {opened['fingerprints']} fingerprints: {opened['opening']}")
        parts = f"--unit {units - 1}, or --sum, or --update"
        line(
            f"next: verbatim audit {shlex.quote(store)} --step {step} --draw {draw}{with_records(str(records))} {parts}"
        )
