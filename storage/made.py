"""What a release holds beside what run, mix and audits left: made when it is published, the same from the same run.

code/<digest>.tar, code/constraints.txt    (code_archive.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.assembled import Assembled
from storage.code_archive import LOCK, LOCK_KEY, archive_key, code_of, pack, source_files
from storage.run import Run
from storage.store import Store, object_digest


@dataclass(frozen=True)
class Made:
    """The store in which the objects can be read, the digests they must have, and those of code and lock."""

    store: Store
    digests: dict[str, str]
    code: str
    lock: str


def made(run: Run, others: Mapping[str, int]) -> Made:
    """What is made for a release of the run as it is now. others: the release's other objects, with their bytes."""
    files = source_files()
    code, lock = code_of(files), object_digest(files[LOCK])
    whole = {archive_key(code): pack(files), LOCK_KEY: files[LOCK]}
    store = Assembled(f"what is made of {run.store.uri}", {key: [data] for key, data in whole.items()})
    return Made(store, {key: object_digest(data) for key, data in whole.items()}, code, lock)
