"""What all files of commands share: how an address is read, a line printed, options that mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from storage.errors import UsageError, printable

console = Console()

StoreArgument = Annotated[str, typer.Argument(help="The published run: a folder, file:// or s3:// address.")]
MirrorOption = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="A further copy, for what is bad in the others; may be given several times."),
]
KeysOption = Annotated[
    Path, typer.Option(help="Folder of this machine's signing keys, made at first use; sample needs the run's own.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def line(text: str) -> None:
    """Plain text, never folded: whoever reads it may be a program."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def absolute(path: str) -> str:
    """Folders given on a command line are relative to where it was typed; flows and children run elsewhere.

    UsageError for an address that is none: one may hold a password, which the history of flows would keep.
    """
    absolute = path if not path or "://" in path else str(Path(path).absolute())
    if any("\ud800" <= letter <= "\udfff" for letter in absolute):  # how Python shows bytes that are not UTF-8
        raise UsageError(f"the name {absolute} is not UTF-8", next_step="rename the folder or file")
    if "://" in path:
        from storage.store import open_store

        open_store(path)
    return absolute


def all_absolute(paths: list[str] | None) -> list[str]:
    """Each of them, none for None."""
    return [absolute(path) for path in paths or ()]
