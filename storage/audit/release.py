"""A published run checked without a replay: is every record genuine, and do all of them agree?"""

from typing import NamedTuple

from storage import checkpoint
from storage.audit.check import check_entries
from storage.audit.contents import check_listed, needed
from storage.audit.kept import AUDITS, records_of
from storage.audit.later import Later, check_genuine, check_later, find_later
from storage.classes import AUDIT_CLASSES
from storage.code_archive import LOCK, LOCK_KEY, MAX_ARCHIVE, archive_key, code_of, unpack
from storage.errors import InputFault
from storage.export import PROGRAM, exported
from storage.page.make import PAGE_KEY
from storage.release import RELEASE_KEY, ReleaseBody, check_objects, load_release
from storage.run import Run, open_release
from storage.store import Store, object_digest


class Checked(NamedTuple):
    """What was found to be sound: the release, and what came later to each copy."""

    body: ReleaseBody
    later: Later


def check_release(store: Store) -> Checked:
    """The release in `store`, every byte of it read, its copies listed once.

    Chain and signature; every object as listed, nothing beside them but what proves itself (later.py), and everything
    that a replay reads listed; code and lock; the export against the last checkpoint; records of audits; what each
    entry says against spec and mix; every window against its leaf, every checkpoint against the ledger's state roots.
    Raises InputFault, Divergence or Refused for the first that is wrong.
    """
    run = open_release(store)
    body = load_release(store, run.ledger)
    check_objects(store, body)
    check_listed(needed(run) | {archive_key(body.code): "", LOCK_KEY: body.lock, PAGE_KEY: ""}, _digests(body))
    later = find_later(store, body.objects)
    code = _check_code(store, body)
    _check_export(run, body, code)
    listed = {key for name in AUDIT_CLASSES for key in body.classes[name].objects}
    check_genuine(run, listed, records_of(run.store, run.ledger, AUDITS))
    check_later(run, later)
    check_entries(run)
    run.stream.check()
    for step in checkpoint.steps(store):
        checkpoint.check(store, run.ledger, step)
    return Checked(body, later)


def _digests(body: ReleaseBody) -> dict[str, str]:
    return {key: entry.digest for key, entry in body.objects.items()}


def _check_code(store: Store, body: ReleaseBody) -> dict[str, bytes]:
    """The archive is that of the code digest in its name, and holds the lock that lies beside it."""
    key = archive_key(body.code)
    files = unpack(store.read(key, limit=MAX_ARCHIVE), key)
    for what, found, expected in (
        ("code", code_of(files), body.code),
        ("lock", object_digest(files.get(LOCK, b"")), body.lock),
        ("number of archives", str(body.classes["code"].count), "1"),
    ):
        if found != expected:
            raise InputFault(
                f"{key}: its {what} is {found}, {RELEASE_KEY} says {expected}",
                cause="the publisher put other code there than the release states",
                next_step="do not run this code; ask its publisher",
            )
    return files


def _check_export(run: Run, body: ReleaseBody, code: dict[str, bytes]) -> None:
    """What plain code loads is the last checkpoint's weights, by the program that is in the archived code."""
    demanded = {key: entry.digest for key, entry in exported(run, code.get(PROGRAM, b"")).items()}
    listed = {key: entry.digest for key, entry in body.classes["export"].objects.items()}
    for key in sorted(demanded.keys() | listed.keys()):
        if (found := listed.get(key, "nothing")) != (expected := demanded.get(key, "nothing")):
            raise InputFault(
                f"{RELEASE_KEY} lists {found} under {key}, the last checkpoint and the code give {expected}",
                cause="the publisher exported other weights, or ran another program, than the release holds",
                next_step="do not load it; ask its publisher",
            )
