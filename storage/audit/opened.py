"""Where openings lie: in a store of their own beside each copy of a release.

    <address of the copy>/opened/    checkpoints/<k>.json, objects/<digest>, openings/<N>.json    (opening.py)

A release is signed, and never changes; an opening is made later, by anyone.
"""

import re
from contextlib import suppress

from storage import checkpoint
from storage.errors import Refused, StorageError
from storage.mirrors import stores_of
from storage.store import Store, open_store

_KEY = re.compile(r"openings/(\d{8})\.json", re.ASCII)


def opening_key(step: int) -> str:
    """Key of the opening of a step, in a store of openings."""
    return f"openings/{step:08d}.json"


def opened_stores(release: Store) -> list[Store]:
    """The stores of openings, one beside each copy of the release, the preferred first; they may be empty."""
    return [open_store(f"{copy.uri.rstrip('/')}/opened") for copy in stores_of(release)]


def store_of_opening(release: Store, step: int) -> Store | None:
    """The first of these stores that has an opening of the step, None where none has. StorageError where none was
    found, and one could not be asked."""
    key, failures = opening_key(step), list[StorageError]()
    for store in opened_stores(release):
        try:
            if key in store.list(key):
                return store
        except StorageError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return None


def opened_steps(release: Store) -> frozenset[int]:
    """Steps that have an opening beside any copy of the release; a copy that cannot be asked has none."""
    found: set[int] = set()
    for store in opened_stores(release):
        with suppress(StorageError):
            found |= {int(match[1]) for match in map(_KEY.fullmatch, store.list("openings/")) if match}
    return frozenset(found)


def published_states(release: Store) -> list[tuple[int, Store]]:
    """(k, store that holds it) of every state that was published: checkpoints, then what was opened."""
    found = [(k, release) for k in checkpoint.steps(release)]
    for store in opened_stores(release):
        with suppress(StorageError):  # what cannot be asked only makes a replay longer
            found += [(k, store) for k in checkpoint.steps(store)]
    return found


def nearest_state(release: Store, step: int) -> tuple[int, Store]:
    """(k, store that holds it) of the last state at or before `step` that was published."""
    found = [(k, store) for k, store in published_states(release) if k <= step]
    if not found:
        raise Refused(f"no checkpoint at or before step {step} was published")
    return max(found, key=lambda state: state[0])
