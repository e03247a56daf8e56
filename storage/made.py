"""What a release holds beside what run, mix and audits left: made when it is published, the same from the same run.

code/ is of code_archive.py, export/ of export.py, index.html of page/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.assembled import Assembled, Assembly
from storage.code_archive import LOCK, LOCK_KEY, archive_key, code_of, pack, source_files
from storage.export import PROGRAM, exported
from storage.olmes import Body
from storage.page.history import history
from storage.page.make import PAGE_KEY, page
from storage.page.markup import Place
from storage.release import RELEASE_KEY
from storage.run import Run
from storage.store import object_digest


@dataclass(frozen=True)
class Made:
    """The store in which the objects can be read; the digests of code and lock."""

    store: Assembled
    code: str
    lock: str


def made(run: Run, others: Mapping[str, int], scores: Sequence[Body]) -> Made:
    """What is made for a release of the run as it is now. others: the release's other objects, with their bytes.
    scores: on tasks, of the records that are published with it."""
    files = source_files()
    code = code_of(files)
    found = {archive_key(code): Assembly.of(pack(files)), LOCK_KEY: Assembly.of(files[LOCK])}
    found |= exported(run, files[PROGRAM])
    sizes = {key: assembly.size for key, assembly in found.items()}
    place = Place({**others, **sizes, PAGE_KEY: None, RELEASE_KEY: None}, code=code)
    found[PAGE_KEY] = Assembly.of(page(history(run.store, run.ledger), place, scores=scores))
    return Made(Assembled(f"what is made of {run.store.uri}", found), code, object_digest(files[LOCK]))
