"""Where openings lie: in a store of their own beside each copy of a release.

    <address of the copy>/opened/    checkpoints/<k>.json, objects/<digest>, openings/<N>.json    (opening.py)

A release is signed, and never changes; an opening is made later, by anyone. No list vouches for it: whoever reads it
proves it by the ledger, and takes from beside another copy what is damaged beside one.
"""

import re
from contextlib import suppress

from storage import checkpoint
from storage.errors import Refused, StorageError
from storage.mirrors import Beside
from storage.store import Store

FOLDER = "opened"

_KEY = re.compile(r"openings/(\d{8})\.json", re.ASCII)


def opening_key(step: int) -> str:
    """Key of the opening of a step, in a store of openings."""
    return f"openings/{step:08d}.json"


def opened_beside(release: Store) -> Beside:
    """The openings beside all copies of the release; `stores` has one for each, the preferred first."""
    return Beside(release, FOLDER)


def is_open(release: Store, step: int) -> bool:
    """Whether an opening of the step lies beside any copy. StorageError where none was found, and one could not be
    asked."""
    key = opening_key(step)
    return key in opened_beside(release).list(key)


def opened_steps(release: Store) -> frozenset[int]:
    """Steps that have an opening beside any copy of the release; a copy that cannot be asked has none."""
    keys: list[str] = []
    with suppress(StorageError):
        keys = opened_beside(release).list("openings/")
    return frozenset(int(match[1]) for match in map(_KEY.fullmatch, keys) if match)


def published_states(release: Store) -> list[tuple[int, Store]]:
    """(k, store that holds it) of every state that was published: checkpoints, then what was opened."""
    found, beside = [(k, release) for k in checkpoint.steps(release)], opened_beside(release)
    with suppress(StorageError):  # what cannot be asked only makes a replay longer
        found += [(k, beside) for k in checkpoint.steps(beside)]
    return found


def nearest_state(release: Store, step: int) -> tuple[int, Store]:
    """(k, store that holds it) of the last state at or before `step` that was published."""
    found = [(k, store) for k, store in published_states(release) if k <= step]
    if not found:
        raise Refused(f"no checkpoint at or before step {step} was published")
    return max(found, key=lambda state: state[0])
