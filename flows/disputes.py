"""The commands of disputes: accuse, dispute. cli.py registers them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.terminal import JsonOption, KeysOption, MirrorOption, StoreArgument, absolute, all_absolute, line
from tasks.references import AUDITS, KEYS

if TYPE_CHECKING:
    from storage.audit.verdict import Report

BackendOption = Annotated[str, typer.Option(help="By which backend the step is replayed; verbatim audit lists them.")]
RecordsOption = Annotated[Path, typer.Option(help="Folder for this machine's certificates and disputes.")]
RIGHT = {
    "ledger": "the ledger is right: its entry came out here, the accuser's did not",
    "accuser": "the accuser is right: the same entry came out here, and it is not the ledger's",
    "neither": "neither is right: what came out here is neither the ledger's entry nor the accuser's",
    "": "nothing was decided",
}


Say = Callable[[bool], "Report"]  # shows progress, or is quiet
Show = Callable[[dict[str, Any], bool], None]  # prints a verdict, as JSON or as text


def register(app: typer.Typer, say: Say, show: Show) -> None:
    """Add the commands to the program."""
    _add_accuse(app, say, show)
    _add_dispute(app, say, show)


def _add_accuse(app: typer.Typer, say: Say, show: Show) -> None:
    @app.command()
    def accuse(
        store: StoreArgument,
        step: Annotated[int, typer.Option(min=0, help="The step that did not match.")],
        backend: BackendOption = "cpu",
        second: Annotated[str, typer.Option(help="Another backend, which must agree operation by operation.")] = (
            "reference"
        ),
        mirror: MirrorOption = None,
        records: RecordsOption = AUDITS,
        keys: KeysOption = KEYS,
        as_json: JsonOption = False,
    ) -> None:
        """Dispute a step: write a no-match into a file that others can judge.

        Audits the step with a digest of every operation, by two backends. If both find the same no-match, the file says
        what differs, down to the row where the state is published, and is signed with the auditor's key. The reference
        is slow: a step takes minutes to hours.

        \b
        Example: verbatim accuse runs/demo/published --step 17
        """
        from tasks import dispute

        copies, kept = [absolute(store), *all_absolute(mirror)], str(records.absolute())
        done = dispute.accuse(copies, step, backend, second, kept, str(keys.absolute()), say(as_json))
        show(done, as_json)
        if done["dispute"] and not as_json:
            line(f"dispute: {done['dispute']}\n  next: give it to others, for: verbatim dispute FILE {store}")
        raise typer.Exit(int(done["exit_code"]))


def _add_dispute(app: typer.Typer, say: Say, show: Show) -> None:
    @app.command()
    def dispute(
        file: Annotated[Path, typer.Argument(help="A dispute file, as verbatim accuse writes it.")],
        store: StoreArgument,
        backend: BackendOption = "cpu",
        mirror: MirrorOption = None,
        records: RecordsOption = AUDITS,
        keys: KeysOption = KEYS,
        as_json: JsonOption = False,
    ) -> None:
        """Judge a dispute: replay its step and say who is right.

        Ledger, accuser or neither; and the first operation in which this replay and the accuser's part, done again by
        the reference. Exit code 0 if the ledger is right, 10 if it is not.

        \b
        Example: verbatim dispute step-17.json runs/demo/published
        """
        from tasks import dispute as disputes

        copies, kept = [absolute(store), *all_absolute(mirror)], str(records.absolute())
        done = disputes.judge(file, copies, backend, kept, str(keys.absolute()), say(as_json))
        show(done, as_json)
        if not as_json:
            for text in _lines(done):
                line(text)
        raise typer.Exit(int(done["exit_code"]))


def _lines(done: dict[str, Any]) -> list[str]:
    """Who is right, and what was found on the way."""
    place = done["place"]
    found = {
        "first operation where the accuser differs from this replay": done["differs"],
        "first operation whose recorded result is another": done["contradicted"],
        "first place in the state": place and f"{place['tensor']}, leaf {place['leaf']}, row {place['row']}",
    }
    return [RIGHT[done["right"]], f"  accuser: key {done['accuser']}"] + [
        f"  {what}: {said}" for what, said in found.items() if said
    ]
