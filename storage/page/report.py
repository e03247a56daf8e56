"""The page of `verbatim coverage --page`: the same as in the release, with what its maker collected of audits."""

import os
import re
import secrets
from pathlib import Path
from urllib.parse import quote

from storage.audit.standing import Standing
from storage.errors import UsageError
from storage.ledger import Ledger
from storage.named import open_file
from storage.page.history import history
from storage.page.make import page
from storage.page.markup import Place
from storage.release import RELEASE_KEY, load_release
from storage.store import LocalStore, Store

BEGINS = b"<!doctype html>"
FOLDER = "pages"
_KEPT = re.compile(r"[0-9a-f]{16}\.html", re.ASCII)


def page_file(records: Path, run: str) -> Path:
    """Where a machine keeps a run's page, beside the records from which it is made anew; its folder is created."""
    try:
        (records / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{records / FOLDER} cannot be made: {error.strerror}", next_step="name other records"
        ) from None
    return records / FOLDER / f"{run[:16]}.html"


def is_kept_page(file: Path) -> bool:
    """Whether the file is such a page, by its folder, its name and how it begins."""
    named = file.parent.name == FOLDER and _KEPT.fullmatch(file.name)
    return bool(named) and file.is_file() and _is_page(file)


def write_report(file: Path, store: Store, ledger: Ledger, standing: Standing) -> None:
    """Write the page of the run in `store`. UsageError where the file lies in that store, which never changes, holds
    something else, or cannot be written."""
    file = file.absolute()
    try:
        if isinstance(store, LocalStore) and file.resolve().is_relative_to(store.root.resolve()):
            raise UsageError(
                f"{file} lies in the run that it is about, to which nothing may be added; nothing was written",
                next_step="name a file elsewhere",
            )
        if file.exists() and not _is_page(file):
            raise UsageError(f"{file} holds no page; nothing was written", next_step="name another file")
        place, scores = _place(store, ledger, file.parent), standing.evidence.evaluations
        _replace(file, page(history(store, ledger), place, standing, scores))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", next_step="name another file") from None


def _replace(file: Path, data: bytes) -> None:
    """A page that someone reads meanwhile is the old one or the new one, each whole."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_page(file: Path) -> bool:
    with open_file(file) as there:
        return there.read(len(BEGINS)) == BEGINS


def _place(store: Store, ledger: Ledger, folder: Path) -> Place:
    """Where the store's objects lie as seen from a page in the folder."""
    base = None
    if isinstance(store, LocalStore):
        base = quote(os.path.relpath(store.root, folder)) + "/"
    if RELEASE_KEY not in (keys := store.list()):
        return Place(dict.fromkeys(keys), base)
    body = load_release(store, ledger)
    sizes: dict[str, int | None] = {key: entry.size for key, entry in body.objects.items()}
    return Place({**sizes, RELEASE_KEY: None}, base, body.code, signed=True)
